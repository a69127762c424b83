"""JSON schemas as grammars over a model's tokens, by llguidance. No torch, no transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from baton.errors import ConfigError, EngineFault, InvalidRequest
from baton.text.schema_compiling import FIELD, compile_schema, shortened
from baton.text.tokenizer import TOKENIZER_FILE

Mask = npt.NDArray[np.int32]

_NOT_ALLOWED = "doesn't satisfy the grammar"
"""What the library says of a token that may not come. It has one kind of error, whatever went wrong."""


class JsonGrammars:
    """Compiles schemas for one model. Its methods may be called from any thread, and let others run meanwhile."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Takes 20 ms for 4,000 tokens and a second for 150,000, in which no other thread of Python runs.

        Raises ConfigError for a tokenizer that can't be used.
        """
        eos = sorted(eos_token_ids)
        if not eos:
            raise ConfigError("the model has no end-of-sequence token, so no answer could end")
        try:
            self._tokenizer = LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=eos, slices=LLTokenizer.json_slices()
            )
        except Exception as error:  # the library's own are ValueError and whatever its Rust panics with
            raise ConfigError(f"the tokenizer can't be used for grammars: {shortened(error)}") from error
        bits = np.zeros(num_mask_words(vocab_size) * 32, dtype=np.uint8)
        bits[eos] = 1
        self._but_eos = ~np.packbits(bits, bitorder="little").view(np.int32)

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> JsonGrammars:
        """Of a model directory; raises ConfigError when it can't."""
        path = model_dir / TOKENIZER_FILE
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} can't be read: {error}") from error
        return cls(text, vocab_size, eos_token_ids)

    def matcher(self, json_schema: str) -> JsonMatcher:
        """A new matcher for one sequence; raises InvalidRequest.

        Of a schema that `SchemaSandbox.check` has let pass: another one may take this process's memory. Each is
        compiled anew: copies would share the automaton that they build as they go, and with it its limits.
        """
        return JsonMatcher(compile_schema(json_schema, self._tokenizer), self._but_eos)


class JsonMatcher:
    """A `TokenMatcher`. The library is called the same way for a token whether it was drawn here or elsewhere."""

    def __init__(self, matcher: LLMatcher, but_eos: Mask) -> None:
        """`but_eos`: a bit for each token that does not end the answer."""
        self._matcher = matcher
        self._but_eos = but_eos
        self._num_tokens = 0
        self._is_masked = False
        """The mask of the next token has been computed."""

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not self._is_masked:
                self._matcher.compute_bitmask()
            self._matcher.consume_token(int(token_id))
            self._check()
            self._num_tokens += 1
            self._is_masked = False

    def fill(self, mask: Mask) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        self._is_masked = True
        if not self._matcher.is_accepting():
            # Some vocabularies have an end token with a text, which could be a part of the answer.
            mask &= self._but_eos

    def _check(self) -> None:
        if self._matcher.is_error():
            story = shortened(self._matcher.get_error())
            # Everything else that it says is of limits, and those are the schema's own fault.
            raise EngineFault(f"{FIELD}: {story}") if _NOT_ALLOWED in story else InvalidRequest(FIELD, story)


def num_mask_words(vocab_size: int) -> int:
    """Words of 32 bits with a bit for each token."""
    return -(-vocab_size // 32)

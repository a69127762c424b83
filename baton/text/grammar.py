"""JSON schemas, regular expressions, choices and grammars as automata over a model's tokens, based on llguidance.

Needs no torch and no transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from baton.errors import ConfigError, EngineFault, InvalidRequest
from baton.messages.sampling import ConstraintKind
from baton.text.schema_compiling import compile_constraint, shortened
from baton.text.tokenizer import TOKENIZER_FILE

Mask = npt.NDArray[np.int32]

_MAX_FORCED_BYTES = 256
"""The most forced bytes that become tokens at a time: 64 KB, as in a constant, would take 50 ms at every token."""
_NOT_ALLOWED = "doesn't satisfy the grammar"
"""Part of llguidance's message for a token that is not allowed; its errors differ only in their text."""


class Grammars:
    """Compiles schemas for one model. Its methods may be called from any thread, and release the interpreter lock."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Prepare the tokenizer, which takes 20 ms for 4,000 tokens and 1 s for 150,000 and blocks all other threads.

        Raises ConfigError for a tokenizer that llguidance can't use.
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
        self._all_but_eos = ~np.packbits(bits, bitorder="little").view(np.int32)

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> Grammars:
        """Prepare the tokenizer of a model directory; raises ConfigError when it can't be read or used."""
        path = model_dir / TOKENIZER_FILE
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} can't be read: {error}") from error
        return cls(text, vocab_size, eos_token_ids)

    def matcher(self, text: str, kind: ConstraintKind = "json_schema") -> GrammarMatcher:
        """A new matcher for one sequence; raises InvalidRequest.

        The schema must have passed `ConstraintChecker.check`: another one may use up this process's memory. Each
        matcher is compiled anew, since copies would share the automaton that they extend while they match, and its
        limits.
        """
        return GrammarMatcher(compile_constraint(text, self._tokenizer, kind), self._tokenizer, self._all_but_eos, kind)


class GrammarMatcher:
    """A `TokenMatcher` for one sequence.

    The library's calls for a token are the same whether it was sampled here or by an earlier attempt, so that its
    limits are reached at the same token.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, all_but_eos: Mask, kind: ConstraintKind) -> None:
        """`all_but_eos`: a mask with the bits of all tokens that don't end the output. `kind`: what errors name."""
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._kind = kind
        self._all_but_eos = all_but_eos
        self._num_tokens = 0
        self._last_token_ids: list[int] = []
        """The last token, or none at the beginning."""
        self._is_masked = False
        """Whether the mask of the next token has been computed."""

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
            self._last_token_ids = [int(token_id)]
            self._is_masked = False

    def forced_tokens(self) -> Sequence[int]:
        # Both calls walk along the forced bytes as the next mask would. If that reaches a limit, the mask reports it.
        forced = self._matcher.compute_ff_bytes()
        if len(forced) <= _MAX_FORCED_BYTES:
            return self._matcher.compute_ff_tokens() if forced else ()
        return self._tokenizer.tokenize_partial(forced[:_MAX_FORCED_BYTES], self._last_token_ids)[0]

    def fill(self, mask: Mask) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        self._is_masked = True
        if not self._matcher.is_accepting():
            # Some vocabularies have an end token with a text that could be part of the output.
            mask &= self._all_but_eos

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = shortened(self._matcher.get_error())
            # All other errors are about limits that the schema exceeds, so the request is invalid.
            raise (
                EngineFault(f"{self._kind}: {reason}") if _NOT_ALLOWED in reason else InvalidRequest(self._kind, reason)
            )


def num_mask_words(vocab_size: int) -> int:
    """The number of 32-bit words in a mask with one bit for each token."""
    return -(-vocab_size // 32)

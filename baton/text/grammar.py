"""JSON schemas as grammars over a model's tokens, by llguidance. No torch, no transformers.

Checking a schema needs no vocabulary: a router compiles it over plain bytes, within the bounds that nodes have for it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.errors import ConfigError, EngineFault, InvalidRequest
from baton.text.tokenizer import TOKENIZER_FILE

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Mask = npt.NDArray[np.int32]

JSON_OBJECT = '{"type": "object"}'
"""The schema of any JSON object."""
MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32
"""Arrays and objects within each other."""
_FIELD = "json_schema"
_FIRST_BYTES = 16
_MAX_DIGITS = 400
_MAX_ERROR_CHARS = 200
_NOT_ALLOWED = "doesn't satisfy the grammar"
"""What the library says of a token that may not come. It has one kind of error, whatever went wrong."""
_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"\x20|\x0A[\x20\x09]{0,32}"}
"""Between two tokens of JSON: a blank, or a new line and its indentation. Bounded, since models are known to go on with
blanks until their length stops them."""


def _limits() -> LLParserLimits:
    # llguidance's own but for the memory of one matcher (1 to 2 kB a state). They count work, not time, so a schema
    # that is too complex is so everywhere.
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def check_json_schema(text: str) -> None:
    """Raises InvalidRequest for a schema that no answer could be held to. Best called in a thread: 0.5 to 250 ms."""
    _check_json(text)
    tokenizer = _bytes_alone()
    mask = np.zeros(num_mask_words(tokenizer.vocab_size), dtype=np.int32)
    matcher = JsonMatcher(_compiled(text, tokenizer), ~mask)
    # Some schemas are found too complex only when the first tokens are asked for.
    for _ in range(_FIRST_BYTES):
        matcher.fill(mask)
        following = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        visible = following[(following > ord(" ")) & (following < 256)]
        if not visible.size:
            return
        matcher.advance(visible[:1].tolist())


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
            raise ConfigError(f"the tokenizer can't be used for grammars: {_shortened(error)}") from error
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

        Each is compiled anew: copies would share the automaton that they build as they go, and with it its limits.
        """
        _check_json(json_schema)
        return JsonMatcher(_compiled(json_schema, self._tokenizer), self._but_eos)


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
            story = _shortened(self._matcher.get_error())
            # Everything else that it says is of limits, and those are the schema's own fault.
            raise EngineFault(f"{_FIELD}: {story}") if _NOT_ALLOWED in story else InvalidRequest(_FIELD, story)


def num_mask_words(vocab_size: int) -> int:
    """Words of 32 bits with a bit for each token."""
    return -(-vocab_size // 32)


@lru_cache(maxsize=1)
def _bytes_alone() -> LLTokenizer:
    return LLTokenizer("byte")


def _compiled(text: str, tokenizer: LLTokenizer) -> LLMatcher:
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, defaults=_OPTIONS)
    except ValueError as error:
        raise InvalidRequest(_FIELD, _shortened(error)) from None
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
    if matcher.is_error():
        raise InvalidRequest(_FIELD, _shortened(matcher.get_error()))
    return matcher


def _shortened(error: object) -> str:
    """What the library says, in one line."""
    line = " ".join(str(error).replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_ERROR_CHARS else f"{line[: _MAX_ERROR_CHARS - 3]}..."


def _check_json(text: str) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(_FIELD, "is not valid UTF-8") from None
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequest(_FIELD, f"has {num_bytes} bytes; at most {MAX_SCHEMA_BYTES} are taken")
    too_deep = InvalidRequest(_FIELD, f"is deeper than {MAX_SCHEMA_DEPTH} levels")
    try:
        schema = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        raise InvalidRequest(_FIELD, f"is not JSON: {_shortened(error)}") from None
    if not isinstance(schema, dict):
        raise InvalidRequest(_FIELD, "must be a JSON object")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise too_deep


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {twice[:80]!r} is there twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _bounded(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large")
    return number


def _depth(value: Any) -> int:
    deepest, pending = 0, [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if not isinstance(item, dict | list):
            continue
        deepest = max(deepest, depth)
        pending.extend((child, depth + 1) for child in (item.values() if isinstance(item, dict) else item))
    return deepest

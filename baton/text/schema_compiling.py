"""Compiles what an output must be to llguidance's automaton, and checks its limits.

That is a JSON schema, a regular expression, a choice or a grammar; below, "schema" stands for all of them.
Compiling may take any time and any memory: intersections of patterns grow exponentially, and no limit of the library
counts them (26 MB for 18 patterns `^.*a.{i}$` under `allOf`, 472 MB for 22). So a schema is compiled for the first time
in a child process that may be killed: see `bounded_workers`. This module imports little, since the child imports it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from baton.errors import InvalidRequest
from baton.messages.sampling import ConstraintKind
from baton.text.described_formats import without_descriptions
from baton.text.gbnf import is_gbnf, lark_of_gbnf

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

JSON_OBJECT = '{"type": "object"}'
"""The schema of any JSON object."""
MAX_SCHEMA_BYTES = 64 << 10
MAX_CHOICE_JSON_BYTES = 1 << 20
"""The largest choice as JSON: 64 KiB of texts, in which a character may be written with six, and 10,000 separators."""
SPECIAL_MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Markers of calls and reasoning that are special tokens of some models. A grammar asks for one by its name without
quotes, and a node whose model has no such token refuses it."""
MAX_SCHEMA_DEPTH = 32
"""The deepest nesting of arrays and objects in a schema."""
FIELD = "json_schema"
_MAX_LEXER_STATES = 50_000
_FIRST_BYTES = 16
"""Number of bytes of output for which masks are computed when a schema is checked."""
_MAX_DIGITS = 400
_MAX_ERROR_CHARS = 200
_NO_EXTENSION = "NoExtensionBias"
"""Part of llguidance's message for an output that can neither go on nor end."""
NOTHING_FITS = "no text that the model can write fits"
_ONE_OF = "coerce_one_of"
"""Part of llguidance's message, an option of the library, for schemas that a value might fit together."""
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"\x20|\x0A[\x20\x09]{0,32}"}
"""Permits a blank, or a new line and its indentation, between two tokens of JSON. The length is bounded, since models
tend to generate blanks until the length limit ends them."""


def check_constraint(text: str, kind: ConstraintKind = "json_schema") -> None:
    """Compile a constraint over bytes and compute its first masks; raises InvalidRequest for one that can't be served.

    Takes 0.5 to 250 ms for those that people write, and any time and memory for others: call `ConstraintChecker.check`.
    """
    matcher = compile_constraint(text, _byte_tokenizer(), kind)
    # Some turn out to be too complex only when masks are computed.
    for _ in range(_FIRST_BYTES):
        mask = matcher.compute_bitmask()
        check_matcher(matcher, kind)
        visible = next((byte for byte in range(ord(" ") + 1, 256) if mask[byte // 8] >> byte % 8 & 1), None)
        if visible is None:
            return
        matcher.consume_token(visible)
        check_matcher(matcher, kind)


def compile_constraint(text: str, tokenizer: LLTokenizer, kind: ConstraintKind = "json_schema") -> LLMatcher:
    """A matcher over the tokenizer's tokens; raises InvalidRequest. Releases the interpreter lock.

    What the matcher builds while it matches, 30 MB in all, is bounded by llguidance's own limits. They count work and
    not time, and permit a mask that takes a second: see `grammar_cost`.
    """
    try:
        grammar = _grammar_of(text, kind)
    except ValueError as error:
        raise InvalidRequest(kind, shortened(error)) from None
    limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    check_matcher(matcher, kind)
    return matcher


def _grammar_of(text: str, kind: ConstraintKind) -> str:
    """The constraint in llguidance's own format; raises ValueError, or InvalidRequest."""
    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(without_descriptions(parse_schema(text)), defaults=JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            # One regular expression, since a rule for each text would exceed the parser's limits.
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, dict.fromkeys(json.loads(text)))))
        case "grammar":
            return LLMatcher.grammar_from_lark(lark_of_gbnf(text) if is_gbnf(text) else text)


def shortened(error: object) -> str:
    """The library's error message in one line of at most _MAX_ERROR_CHARS characters."""
    text = str(error)
    if _NO_EXTENSION in text:
        return NOTHING_FITS
    if _ONE_OF in text:
        return "has oneOf of which a value may fit several; use anyOf"
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_ERROR_CHARS else f"{line[: _MAX_ERROR_CHARS - 3]}..."


def check_matcher(matcher: LLMatcher, kind: ConstraintKind) -> None:
    """Raises InvalidRequest if the matcher has failed."""
    if matcher.is_error():
        raise InvalidRequest(kind, shortened(matcher.get_error()))


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    # Uses the same slices as the nodes' tokenizers, so that compiling takes the same work as on a node.
    return LLTokenizer(TokenizerWrapper(_ByteTokens()), slices=LLTokenizer.json_slices())


class _ByteTokens:
    """A token for each byte, an end token, and the special tokens that grammars made here ask for."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *(name.encode() for name in SPECIAL_MARKERS)]
        self.special_token_ids = range(256, len(self.tokens))

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def parse_schema(text: str, field: str = FIELD) -> dict[str, Any]:
    """The schema as a dictionary; raises InvalidRequest for text that is no JSON object, too large or too deep.

    `field`: what errors name.
    """
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(field, "is not valid UTF-8") from None
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequest(field, f"has {num_bytes} bytes; at most {MAX_SCHEMA_BYTES} are taken")
    too_deep = InvalidRequest(field, f"is deeper than {MAX_SCHEMA_DEPTH} levels")
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
        raise InvalidRequest(field, f"is not JSON: {shortened(error)}") from None
    if not isinstance(schema, dict):
        raise InvalidRequest(field, "must be a JSON object")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise too_deep
    return schema


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

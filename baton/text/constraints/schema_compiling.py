"""Compiles what an output must be to llguidance's automaton, and checks its limits.

That is a JSON schema, a regular expression, a choice or a grammar; below, "schema" stands for all of them.
Compiling may take any time and any memory: intersections of patterns grow exponentially, and no limit of the library
counts them (26 MB for 18 patterns `^.*a.{i}$` under `allOf`, 472 MB for 22). So a schema is compiled for the first time
in a child process that may be killed: see `bounded_workers`. This module imports little, since the child imports it.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from baton.errors import InvalidRequest
from baton.messages.sampling import ConstraintKind
from baton.text.constraints.json_schemas import parse_schema, shortened, without_descriptions
from baton.text.constraints.lark_grammars import is_gbnf, lark_of_gbnf

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

JSON_OBJECT = '{"type": "object"}'
"""The schema of any JSON object."""
MAX_CHOICE_JSON_BYTES = 1 << 20
"""The largest choice as JSON: 64 KiB of texts, in which a character may be written with six, and 10,000 separators."""
SPECIAL_MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Markers of calls and reasoning that are special tokens of some models. A grammar asks for one by its name without
quotes, and a node whose model has no such token refuses it."""
_MAX_LEXER_STATES = 50_000
_FIRST_BYTES = 16
"""Number of bytes of output for which masks are computed when a schema is checked."""
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
    not time, and permit a mask that takes a second: see `grammar.GrammarCost`.
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

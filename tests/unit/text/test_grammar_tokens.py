"""Constraints over vocabularies with added tokens: texts that read like such a token, and grammars that ask for one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
import tokenizers

from baton.errors import ConfigError, InvalidRequest
from baton.messages.sampling import ConstraintKind
from baton.text.constraints.grammar import GrammarMatcher, Grammars
from baton.text.constraints.schema_compiling import check_constraint
from baton.text.constraints.structural_tags import lark_of_structural_tag
from baton.text.tokenizer import Tokenizer
from baton.text.tool_calls.events import CallBegun
from baton.text.tool_calls.formats import FORMATS, CallGrammarOptions, Tool
from tests.support.added_tokens import PLAIN, SPECIAL, tokenizer_json
from tests.support.allowed_tokens import allowed_tokens

EOS = 1
BLANK = {"type": "Prepend", "prepend": "Ġ"}


class Model:
    """A vocabulary, with random outputs under a constraint."""

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer))
        self.ids = {text: token for token, text in self.tokenizer.tokens().items()}
        self.size = max(self.ids.values()) + 9
        self.grammars = Grammars(tokenizer, self.size, {EOS})

    def allowed(self, matcher: GrammarMatcher) -> list[int]:
        return allowed_tokens(matcher, self.size)

    def output(self, text: str, kind: ConstraintKind, seed: int = 0) -> list[int]:
        return self.rest(self.grammars.matcher(text, kind), seed)

    def rest(self, matcher: GrammarMatcher, seed: int = 0) -> list[int]:
        """Random tokens up to the end token."""
        rng, tokens = Random(seed), list[int]()
        while (token := rng.choice(self.allowed(matcher))) != EOS:
            guess = matcher.forced_tokens()
            assert set(guess[:1]) <= set(self.allowed(matcher))
            matcher.advance([token])
            tokens.append(token)
        return tokens

    def written(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.tokenizer.spelling, tokens)).decode()


@pytest.fixture(scope="module", params=[SPECIAL, PLAIN + SPECIAL, ()], ids=["mixed", "special", "plain"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    model = Model(tokenizer_json(request.param))
    yield model
    model.grammars.close()


CONTENT = {"type": "regex", "pattern": "[ab]{2}"}
TAG = {"type": "tag", "begin": "<tool_call>", "content": CONTENT, "end": "</tool_call>"}


def constraints(text: str) -> dict[str, tuple[ConstraintKind, str]]:
    """Constraints that nothing but this text fits, or JSON of it."""
    return {
        "regex": ("regex", "".join(f"\\x{{{ord(char):x}}}" for char in text)),
        "lark": ("grammar", f"start: {json.dumps(text)}"),
        "gbnf": ("grammar", f"root ::= {json.dumps(text)}"),
        "choice": ("choice", json.dumps([text])),
        "const": ("json_schema", json.dumps({"const": text})),
    }


@pytest.mark.parametrize("name", constraints(""))
@pytest.mark.parametrize("text", [*PLAIN, *SPECIAL, "ab<tool_call>\n<|im_end|>c</think>"])
def test_a_text_that_reads_like_an_added_token_can_be_written(model: Model, name: str, text: str) -> None:
    kind, constraint = constraints(text)[name]
    check_constraint(constraint, kind)
    for seed in range(3):
        # Special tokens are left out of an answer's text.
        found = model.tokenizer.decode(model.output(constraint, kind, seed))
        assert (json.loads(found) if name == "const" else found) == text


def test_parts_of_free_text_and_of_tags_read_like_added_tokens(model: Model) -> None:
    tag = lark_of_structural_tag(json.dumps({"type": "structural_tag", "format": TAG}), "response_format")
    regex = r"<(think|\|im_start\|)>[a-c]{3}\n{3}</think>(<tool_call>){2}"
    constrained: list[tuple[ConstraintKind, str]] = [("grammar", tag), ("regex", regex)]
    for kind, text in constrained:
        for seed in range(5):
            assert "<" in model.tokenizer.decode(model.output(text, kind, seed))


def test_an_added_token_that_is_text_is_preferred_where_its_text_must_follow() -> None:
    model = Model(tokenizer_json())
    matcher = model.grammars.matcher('start: "<tool_call>" "\\n{"', "grammar")
    assert model.allowed(matcher) == [model.ids["<tool_call>"]]


def test_a_grammar_can_ask_for_a_special_token_by_name(model: Model) -> None:
    asks, token = 'start: "a" <tool_call> "b"', model.ids["<tool_call>"]
    check_constraint(asks, "grammar")
    if model.tokenizer.is_visible(token):
        with pytest.raises(InvalidRequest, match="unknown special token"):
            model.output(asks, "grammar")
    else:
        assert model.output(asks, "grammar")[1] == token


def test_an_end_token_in_the_middle_is_refused(model: Model) -> None:
    with pytest.raises(InvalidRequest, match="no text that the model can write fits"):
        model.output(f'start: <[{EOS}]> "a"', "grammar")


@pytest.mark.parametrize("name", ["hermes", "smollm2"])
@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_demanded_calls_begin_with_the_marker_that_the_model_was_trained_on(
    model: Model, name: str, reasons: bool, is_parallel: bool
) -> None:
    tools = [Tool.of(one, {"properties": {"x": {"enum": [1]}}, "required": ["x"]}) for one in ("f", "ge")]
    form = FORMATS[name]
    special = [text for text in (*form.markers, "<think>", "</think>") if model.tokenizer.special_ids([text])]
    options = CallGrammarOptions(is_parallel, closes_objects=True, reasons=reasons, is_open=reasons, special=special)
    demand = form.demand(tools, options)
    check_constraint(demand.grammar, "grammar")
    matcher = model.grammars.matcher(demand.grammar, "grammar")
    if reasons:
        matcher.advance([*model.tokenizer.encode_rendered("Hm."), model.ids["</think>"]])
        assert model.ids["<tool_call>"] in model.allowed(matcher)
    else:
        assert model.allowed(matcher) == [model.ids["<tool_call>"]]
    matcher.advance([model.ids["<tool_call>"]])
    written = model.written(rest := model.rest(matcher))
    assert "</tool_call>" in written
    assert not special or model.ids["</tool_call>"] in rest
    parser = form.parser([tool.name for tool in tools], 8)
    events = [*parser.push("<tool_call>" + written), *parser.finish()]
    assert any(isinstance(event, CallBegun) for event in events)


@pytest.mark.parametrize("changes", ["prefix", "sequence", "pre-tokenizer"])
def test_a_blank_before_each_text_is_no_part_of_what_must_follow(changes: str) -> None:
    parts: Any = {
        "prefix": {"normalizer": BLANK},
        "sequence": {"normalizer": {"type": "Sequence", "normalizers": [BLANK, {"type": "NFC"}]}},
        "pre-tokenizer": {
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        },
    }[changes]
    plain, changed = Model(tokenizer_json()), Model(tokenizer_json(**parts))
    text = json.dumps({"const": "Hello world<|im_end|>"})
    assert changed.output(text, "json_schema") == plain.output(text, "json_schema")


def test_a_tokenizer_that_changes_texts_still_writes_what_must_follow() -> None:
    model = Model(tokenizer_json(normalizer={"type": "Lowercase"}))
    assert model.written(model.output('{"const": "Hello"}', "json_schema")) == '"Hello"'


def test_tokens_whose_bytes_are_not_known_have_no_grammars() -> None:
    with pytest.raises(ConfigError, match="its decoder is none of ByteLevel"):
        Model(tokenizer_json(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}))

"""Grammars of texts whose calls may, but need not come: calls of strict tools fit their schemas, other text is free."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import baton
from baton.text.constraints.grammar import Grammars, num_mask_words
from baton.text.constraints.schema_compiling import check_constraint
from baton.text.reasoning import ReasoningSplitter
from baton.text.tokenizer import Tokenizer
from baton.text.tool_calls.call_parser import MAX_CALLS
from baton.text.tool_calls.events import Arguments, CallBegun, CallEnded
from baton.text.tool_calls.formats import FORMATS, CallGrammarOptions, Tool
from tests.support.byte_matching import takes
from tests.support.tool_formats import written

DEMO_MODEL = Path(baton.__file__).parent / "demo_model"
VOCAB, EOS = 4096, 1
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [Tool.of("f", SCHEMA, is_strict=True), Tool.of("g", SCHEMA)]
WITH_TRIGGER = ["hermes", "smollm2"]
REASONING = [(False, False), (True, False), (True, True)]


@cache
def grammar(name: str, is_parallel: bool, reasons: bool, is_open: bool) -> str:
    return FORMATS[name].strict_calls(TOOLS, CallGrammarOptions(is_parallel, True, reasons, is_open))


def calls_in(name: str, text: str, *, is_parallel: bool, reasons: bool, is_open: bool) -> list[tuple[str, str, bool]]:
    """The name, the arguments and whether these are whole, of each call that clients get."""
    if reasons:
        splitter = ReasoningSplitter(is_open=is_open)
        text = splitter.push(text)[1] + splitter.finish()[1]
    parser = FORMATS[name].parser(("f", "g"), MAX_CALLS if is_parallel else 1)
    calls: list[tuple[str, str, bool]] = []
    for event in [*parser.push(text), *parser.finish()]:
        match event:
            case CallBegun(tool):
                calls.append((tool, "", False))
            case Arguments(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more, False)
            case CallEnded(is_complete):
                calls[-1] = (*calls[-1][:2], is_complete)
    return calls


def test_only_formats_with_a_trigger_that_is_text_have_such_a_grammar() -> None:
    assert [name for name, one in FORMATS.items() if one.trigger] == WITH_TRIGGER


@pytest.mark.parametrize("name", WITH_TRIGGER)
@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize(("reasons", "is_open"), REASONING)
def test_strict_tools_are_called_as_their_schemas_say(
    name: str, is_parallel: bool, reasons: bool, is_open: bool
) -> None:
    found = grammar(name, is_parallel, reasons, is_open)
    check_constraint(found, "grammar")
    before = "Hm.</think>" if is_open else ""
    good, free = written(name, [("f", {"x": 1})]), written(name, [("g", {"y": [1]})])
    bad, unknown = written(name, [("f", {"y": 1})]), written(name, [("h", {})])
    for text in ("", "Hi", "a <tool", good, free, f"So: {good} Well."):
        assert takes(found, before + text), text
    for text in (bad, unknown, f"So: {bad}", good[:-15], "<tool_call>", "<tool_call>so</tool_call>"):
        assert not takes(found, before + text), text
    assert takes(found, before + good + "\n" + bad) != is_parallel
    assert takes(found, before + good + "\n" + free)


@pytest.mark.parametrize("name", WITH_TRIGGER)
def test_reasoning_may_have_any_text(name: str) -> None:
    bad, good = written(name, [("f", {"y": 1})]), written(name, [("f", {"x": 1})])
    for is_open, begin in ((False, "\n<think>"), (True, ""), (True, "<think>")):
        found = grammar(name, True, True, is_open)
        for text in (f"{begin}I could {bad}", f"{begin}{bad}</think>No.", f"{begin}{bad}</think>\n{good}"):
            assert takes(found, text), text
        assert not takes(found, f"{begin}Hm.</think>{bad}")
    assert not takes(grammar(name, True, True, False), f"No <think>{bad}</think>"), "reasoning stands at the beginning"


PIECES = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "\n", " ", "so", "[", "]", "}", ", ", "<think>", "</think>", "<", "é"),
            *(written("hermes", [call]) for call in (("f", {"x": 1}), ("f", {"y": 1}), ("f", {"x": 1, "y": 1}))),
            *(written("smollm2", [call, call]) for call in (("f", {"x": 2}), ("f", {}), ("g", {"z": None}))),
            written("hermes", [("g", {"y": {}})]),
            '{"name": "f", "arguments": {"x": 1}}',
            '{"arguments": {"x": "1"}, "name": "f"}',
        ]
    ),
    max_size=6,
).map("".join)


@given(PIECES, st.sampled_from(WITH_TRIGGER), st.booleans(), st.sampled_from(REASONING))
def test_whatever_the_grammar_takes_has_no_other_calls(
    text: str, name: str, is_parallel: bool, reasoning: tuple[bool, bool]
) -> None:
    reasons, is_open = reasoning
    if takes(grammar(name, is_parallel, reasons, is_open), text):
        for tool, arguments, is_complete in calls_in(
            name, text, is_parallel=is_parallel, reasons=reasons, is_open=is_open
        ):
            assert is_complete
            assert tool in ("f", "g")
            value = json.loads(arguments)
            assert tool == "g" or (list(value) == ["x"] and isinstance(value["x"], int))
    else:
        assert "<tool_call>" in text, "text without the trigger is free"


@pytest.mark.parametrize("name", WITH_TRIGGER)
def test_tokens_may_lie_across_the_trigger_and_behind_it_the_call_is_all_that_is_allowed(name: str) -> None:
    """With a model's vocabulary, in which a token may have a part of the trigger and what stands beside it."""
    grammars, tokenizer = Grammars.load(DEMO_MODEL, VOCAB, [EOS]), Tokenizer.load(DEMO_MODEL)
    mask = np.zeros(num_mask_words(VOCAB), dtype=np.int32)
    for before, tool, arguments in (("So: ", "f", {"x": 12}), ("", "g", {"y": {"z": "<tool_call>"}})):
        text = before + written(name, [(tool, arguments)]) + "\n\nDone."
        matcher = grammars.matcher(grammar(name, True, False, False), "grammar")
        end_allowed = []
        for token in [*tokenizer.encode_rendered(text), EOS]:
            matcher.fill(mask)
            end_allowed.append(bool(mask[EOS // 32] >> EOS % 32 & 1))
            assert mask[token // 32] >> token % 32 & 1, tokenizer.decode([token])
            matcher.advance([token])
        assert end_allowed[-1]
        assert not all(end_allowed), "not within the call"
    matcher = grammars.matcher(grammar(name, True, False, False), "grammar")
    matcher.advance(tokenizer.encode_rendered("<tool_call>"))
    forced = tokenizer.decode(matcher.forced_tokens())
    assert forced.startswith({"hermes": '\n{"name": "', "smollm2": '[{"name": "'}[name])
    grammars.close()

"""Tools, calls and results as text, for templates without a place for them, and which templates those are."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from baton.text.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from baton.text.tool_calls.events import Arguments, CallBegun
from baton.text.tool_calls.formats import FORMATS
from baton.text.tool_calls.tools_in_text import tools_in_text
from tests.support.tool_formats import template

NOW = datetime(2026, 1, 1)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é"}}, {"type": "function", "function": {}}]
HI = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALLS = {
    "role": "assistant",
    "content": "So.",
    "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}},
        {"type": "function", "function": {"name": "g", "arguments": "{broken"}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
    {"role": "tool", "tool_call_id": "c2", "content": "2"},
]
ONLY_TEXT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ONLY_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + ONLY_TEXT
NO_RESULTS = "{% for m in messages %}{{ raise_exception('no') if m.role == 'tool' else m.content }}{% endfor %}"
IN_SYSTEM = "{% for m in messages %}{{ m.content }}{% if m.role == 'system' %}{{ tools }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "tools", "calls", "system"),
    [
        (template("hermes"), True, True, True),
        (DEFAULT_TEMPLATE, False, False, True),
        (ONLY_PARTS, False, False, True),
        (NO_SYSTEM, False, False, False),
        (NO_RESULTS, False, False, True),
        (IN_SYSTEM, True, False, True),
        ("{% if tools %}tools{% endif %}{{ messages[0].content }}", False, False, True),
    ],
)
def test_what_a_template_has_a_place_for_is_found_by_rendering(
    source: str, tools: bool, calls: bool, system: bool
) -> None:
    found = ChatTemplate(source, {}).traits
    assert (found.shows_tools, found.shows_calls, found.shows_system) == (tools, calls, system)


def test_a_template_with_tools_of_its_own_has_a_place_for_them() -> None:
    assert ChatTemplate({"default": ONLY_TEXT, "tool_use": template("hermes")}, {}).traits.shows_tools


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_written_as_they_are_read(name: str) -> None:
    calls = [("f", '{"x": {"y": "é"}}'), ("g", "{}")]
    events = FORMATS[name].parser(["f", "g"], 9).push(FORMATS[name].written(calls))
    names = [event.name for event in events if isinstance(event, CallBegun)]
    arguments = [event.text for event in events if isinstance(event, Arguments)]
    assert list(zip(names, arguments, strict=True)) == calls


def texts(messages: list[Any], tools: list[Any], *, shows_system: bool = True) -> list[tuple[str, Any]]:
    made = tools_in_text(messages, tools, FORMATS["hermes"], shows_system=shows_system)
    assert not any("tool_calls" in message or "tool_call_id" in message for message in made)
    return [(message["role"], message["content"]) for message in made]


def test_calls_are_the_text_of_the_assistant_and_their_results_are_one_message_of_the_user() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    broken = '<tool_call>\n{"name": "g", "arguments": {broken}\n</tool_call>'
    answers = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    expected = [("user", "hi"), ("assistant", f"So.\n{call}\n{broken}"), ("user", answers), ("user", "hi")]
    assert texts([HI, CALLS, *RESULTS, HI], []) == expected


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_stand_in_the_system_message_or_in_the_first_of_the_user(role: str) -> None:
    ((_, alone), hi) = texts([HI], TOOLS)
    assert '<tools>\n{"type": "function", "function": {"name": "f", "description": "é"}}\n{"type"' in alone
    assert alone.endswith('<tool_call>\n{"name": "<function-name>", "arguments": <args-json-object>}\n</tool_call>')
    system = {**SYSTEM, "role": role}
    assert texts([system, HI], TOOLS) == [(role, f"Be brief.\n\n{alone}"), hi]
    assert texts([HI, HI], TOOLS, shows_system=False) == [("user", f"{alone}\n\nhi"), hi]
    assert texts([CALLS], TOOLS, shows_system=False)[0] == ("user", alone)


def test_parts_stay_parts() -> None:
    image = {"type": "image"}
    seen = [{**HI, "content": [image]}, CALLS, {**RESULTS[0], "content": [image]}]
    ((_, first), _, (_, result)) = texts(seen, TOOLS, shows_system=False)
    assert [part["type"] for part in first] == ["text", "text", "image"]
    begin, end = [{"type": "text", "text": text} for text in ("<tool_response>\n", "\n</tool_response>")]
    assert result == [begin, image, end]

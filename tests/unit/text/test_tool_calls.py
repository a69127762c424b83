"""Calls of tools are found in a model's text: in each format, however the text was cut, and no text is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.text.tool_calls.call_parser import MAX_HELD_CHARS, MAX_HELD_SPACES, CallParser
from baton.text.tool_calls.events import Arguments, CallBegun, CallEnded, Content, ToolEvent
from baton.text.tool_calls.json_scanner import MAX_DEPTH, JsonScanner, NotJson
from baton.text.tool_calls.parsers import HermesParser, Llama3Parser, MistralParser

NAMES = ("f", "get_time")
PARSERS: Sequence[Callable[..., CallParser]] = (HermesParser, Llama3Parser, MistralParser)
Shown = list[str | tuple[str, str]]
"""Content, and calls as name and arguments; those of a call that is not whole end with an ellipsis."""


def events_of(make: Callable[..., CallParser], pieces: Sequence[str], max_calls: int = 128) -> list[ToolEvent]:
    parser = make(NAMES, max_calls)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    assert parser.finish() == []
    assert "".join(event.source for event in events) == "".join(pieces)
    return events


def shown(events: Sequence[ToolEvent]) -> Shown:
    found: Shown = []
    call: tuple[str, str] | None = None
    for event in events:
        match event:
            case Content(text) if found and isinstance(found[-1], str):
                found[-1] += text
            case Content(text):
                assert call is None
                found.append(text)
            case CallBegun(name):
                assert call is None
                call = name, ""
            case Arguments(text):
                assert call is not None
                call = call[0], call[1] + text
            case CallEnded(is_complete):
                assert call is not None
                if is_complete:
                    assert isinstance(json.loads(call[1]), dict)
                found.append(call if is_complete else (call[0], f"{call[1]}…"))
                call = None
    assert call is None
    return found


@pytest.mark.parametrize("make", PARSERS)
def test_pieces_of_content_are_joined_once(make: Callable[..., CallParser], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many characters that could begin a call a text has."""
    num_made = 0

    class CountedContent(Content):
        def __init__(self, text: str) -> None:
            nonlocal num_made
            num_made += 1
            super().__init__(text)

    monkeypatch.setattr("baton.text.tool_calls.call_parser.Content", CountedContent)
    assert "".join(event.source for event in make(NAMES, 128).push("x" + "<{[;" * 100)) == "x" + "<{[;" * 100
    assert num_made == 1


def parsed(make: Callable[..., CallParser], text: str, max_calls: int = 128) -> Shown:
    whole = shown(events_of(make, [text], max_calls))
    assert shown(events_of(make, list(text), max_calls)) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", '{"a": 1}')]),
        ('I look.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n', ["I look.", ("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"arguments": {"b": [2]}, "name": "g"}'
            "</tool_call>\n\nDone",
            [("f", "{}"), ("g", '{"b": [2]}'), "Done"],
        ),
        (
            '<tool_call>[{"name": "f"}, {"name": "g", "arguments": {"s": "}"}}]</tool_call>',
            [("f", "{}"), ("g", '{"s": "}"}')],
        ),
        (
            '<tool_call>{"id": {"name": "no"}, "name": "f", "arguments": {"name": "x"}}</tool_call>',
            [("f", '{"name": "x"}')],
        ),
        ('<tool_call>{"name": "f", "arguments": {"code": "a\n\tb"}}</tool_call>', [("f", '{"code": "a\\n\\tb"}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": {}}}', [("f", '{"a": {}}')]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_', [("f", "{}")]),
        # Malformed before the arguments: all of it is content.
        ("<tool_call>hello</tool_call>", ["<tool_call>hello</tool_call>"]),
        ('<tool_call>{"name": "f", "arg', ['<tool_call>{"name": "f", "arg']),
        ('<tool_call>{"name": "no name", "arguments": {}}', ['<tool_call>{"name": "no name", "arguments": {}}']),
        ('<tool_call>{"name": "f", "arguments": "{}"}', ['<tool_call>{"name": "f", "arguments": "{}"}']),
        ('<tool_call>{"arguments": {}}', ['<tool_call>{"arguments": {}}']),
        ("<tool_call>[]</tool_call>", ["<tool_call>[]</tool_call>"]),
        ("a < b <tool_<tool_", ["a < b <tool_<tool_"]),
        # A call is found behind a malformed one.
        ('<tool_call> <tool_call>{"name": "f", "arguments": {}}</tool_call>', ["<tool_call> ", ("f", "{}")]),
        # Malformed within the arguments: the call is closed there, and the rest is content.
        ('<tool_call>{"name": "f", "arguments": {"a": True}}</tool_call>', [("f", '{"a": …'), "True}}</tool_call>"]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', [("f", '{"a": 1…')]),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', [("f", "{}"), "}</tool_call>"]),
        (
            '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}</tool_call>',
            [("f", "{}"), ', "arguments": {}}</tool_call>'],
        ),
    ],
)
def test_hermes_and_smollm2(text: str, expected: Shown) -> None:
    assert parsed(HermesParser, text) == expected


OTHERS = ('"parameters": {"a": 1}', '"args": {"a": 1}', '"a": 1', '"type": "function"')


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("others_first", [True, False])
@pytest.mark.parametrize("make", PARSERS)
def test_an_object_with_other_keys_than_those_of_a_call_loses_none(
    make: Callable[..., CallParser], others_first: bool, others: str
) -> None:
    keys = [others, '"name": "f"'] if others_first else ['"name": "f"', others]
    one = f"{{{', '.join(keys)}}}"
    texts = {HermesParser: f"<tool_call>{one}</tool_call>", Llama3Parser: one, MistralParser: f"[TOOL_CALLS] [{one}]"}
    text = next(text for parser, text in texts.items() if parser is make)
    is_call = make is Llama3Parser and "parameters" in others
    assert parsed(make, text) == ([("f", '{"a": 1}')] if is_call else [text])
    behind = text.replace("[{", '[{"name": "f"}, {')
    if behind != text:
        assert parsed(make, behind) == [("f", "{}"), behind.partition('"}')[2]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
        ('\n{"name": "f", "arguments": {}}; {"name": "get_time", "parameters": {}}', [("f", "{}"), ("get_time", "{}")]),
        ('{"name": "f", "parameters": {}}\n{"name": "f", "parameters": {}}\n', [("f", "{}"), ("f", "{}")]),
        ('Now <|python_tag|>{"type": "function", "name": "f", "parameters": {}}', ["Now", ("f", "{}")]),
        ('{"name": "f", "parameters": {}};', [("f", "{}")]),
        ('{"name": "f", "parameters": {}} and more', [("f", "{}"), "and more"]),
        # No calls: another name, JSON that the user asked for, JSON behind other text, and Llama's own tools.
        ('{"name": "Anna", "parameters": {}}', ['{"name": "Anna", "parameters": {}}']),
        ('{"city": "Bonn"}', ['{"city": "Bonn"}']),
        ('See: {"name": "f", "parameters": {}}', ['See: {"name": "f", "parameters": {}}']),
        ("<|python_tag|>brave_search.call(query='x')", ["<|python_tag|>brave_search.call(query='x')"]),
    ],
)
def test_llama3(text: str, expected: Shown) -> None:
    assert parsed(Llama3Parser, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', [("f", '{"a": 1}')]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', [("f", "{}"), ("g", "{}")]),
        ('Hm.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', ["Hm.", ("f", '{"a": 1}'), ("g", "{}")]),
        ('[TOOL_CALLS]f[CALL_ID]a1B2[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
        ('[TOOL_CALLS]f{"a": 1}', [("f", '{"a": 1}')]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1', [("f", '{"a": 1…')]),
        ("[TOOL_CALLS]f[ARGS]1", ["[TOOL_CALLS]f[ARGS]1"]),
        ("[TOOL_CALLS]", ["[TOOL_CALLS]"]),
        ("see [1] and [TOOL]", ["see [1] and [TOOL]"]),
    ],
)
def test_mistral(text: str, expected: Shown) -> None:
    assert parsed(MistralParser, text) == expected


WORDS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}", "<",
    ";", '"name"', '"arguments"', '"parameters"', ":", ",", '"f"', '"get_time"', "f", " ", "\n", " " * 65, "1", "-",
    "true", '"', "\\", "\\u00e9", "é", '{"name": "f", "arguments": {', '{"a": [1, "x"]}', '"x": ', "so", "\0", "\x1f",
]  # fmt: skip


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Calls with some damage, and words of the formats in any order."""
    text = "".join(draw(st.lists(st.sampled_from(WORDS), max_size=12)))
    for _ in range(draw(st.integers(0, 3))):
        arguments = json.dumps(
            draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2))
        )
        key = draw(st.sampled_from(["arguments", "parameters"]))
        call = f'{{"name": "f", "{key}": {arguments}}}'
        named = f"[TOOL_CALLS]f[ARGS]{arguments}"
        text += draw(
            st.sampled_from([f"<tool_call>{call}</tool_call>\n", f"[TOOL_CALLS] [{call}, {call}]", named, f"{call}; "])
        )
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(st.sampled_from(["", "}", '"', ",", "<"])) + text[place + draw(st.integers(0, 2)) :]
    return text


@pytest.mark.parametrize("make", PARSERS)
@given(text=texts(), cuts=st.lists(st.integers(0, 200)), max_calls=st.integers(1, 3))
def test_cuts_change_nothing_and_no_text_is_lost(
    make: Callable[..., CallParser], text: str, cuts: list[int], max_calls: int
) -> None:
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[first:last] for first, last in pairwise(places)]
    whole = shown(events_of(make, [text], max_calls))
    assert shown(events_of(make, pieces, max_calls)) == shown(events_of(make, list(text), max_calls)) == whole
    assert sum(isinstance(part, tuple) for part in whole) <= max_calls


@pytest.mark.parametrize("make", PARSERS)
@given(text=texts())
def test_plain_text_is_not_held_longer_than_a_marker_needs(make: Callable[..., CallParser], text: str) -> None:
    parser = make(NAMES)
    for char in text:
        parser.push(char)
        if parser._is_plain:
            assert parser._held.isspace() or not parser._held
            assert len(parser._held) <= MAX_HELD_SPACES


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_the_scanner_reads_what_json_writes(value: object) -> None:
    text = json.dumps([value])
    scanner = JsonScanner()
    for place, char in enumerate(text):
        assert not scanner.is_done, text[:place]
        scanner.push(char)
    assert scanner.is_done


@given(
    st.lists(
        st.sampled_from(["{", "}", "[", "]", ",", ":", '"a"', "1", "-0.5e3", "01", "tru", "true", " ", "\\", '"']),
        max_size=10,
    )
)
def test_the_scanner_refuses_what_json_refuses(words: list[str]) -> None:
    text = f"[{''.join(words)}]"
    scanner = JsonScanner()
    try:
        for char in text:
            if scanner.is_done:
                raise NotJson(char)
            scanner.push(char)
        is_read = scanner.is_done
    except NotJson:
        is_read = False
    try:
        is_json = json.loads(text) is not None
    except ValueError:
        is_json = False
    assert is_read == is_json


def test_what_a_call_holds_is_bounded() -> None:
    head = '<tool_call>{"x": "' + "y" * MAX_HELD_CHARS
    assert parsed(HermesParser, f'{head}", "name": "f", "arguments": {{}}}}</tool_call>') == [
        f'{head}", "name": "f", "arguments": {{}}}}</tool_call>'
    ]
    deep = '{"a":' * MAX_DEPTH
    assert parsed(HermesParser, f'<tool_call>{{"name": "f", "arguments": {deep}') == [
        ("f", '{"a":' * (MAX_DEPTH - 2) + '{"a":…'),
        '{"a":',
    ]


def test_calls_beyond_the_most_are_content() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parsed(HermesParser, call * 3, max_calls=2) == [("f", "{}"), ("f", "{}"), call]
    both = '{"name": "f"}, {"name": "f"}]'
    assert parsed(MistralParser, f"[TOOL_CALLS][{both}", max_calls=1) == [("f", "{}"), ', {"name": "f"}]']

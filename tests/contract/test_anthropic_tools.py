"""Anthropic's own client calls tools in a loop, as agents do, and reads reasoning, against scripted texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from baton.messages.generation import Chunk
from tests.support.http_rig import CARD, chunk, finished
from tests.support.router_parts import MODEL
from tests.support.served_http import served
from tests.support.tool_formats import MARKERS, template, written
from tests.support.tool_loop import DONE, SCRIPT, tell

if TYPE_CHECKING:
    import anthropic
    from anthropic.types import Message

ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
NOW: dict[str, Any] = {"type": "custom", "name": "now", "input_schema": {"type": "object"}}
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 2000,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [ADD, NOW],
}
THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
ENABLED: Any = {"type": "enabled", "budget_tokens": 1024}


async def whole(client: anthropic.AsyncAnthropic, **fields: Any) -> Message:
    message: Message = await client.messages.create(**fields)
    return message


async def streamed(client: anthropic.AsyncAnthropic, **fields: Any) -> Message:
    """The message that the client itself puts together from the events, which are checked."""
    async with client.messages.stream(**fields) as stream:
        events = [event async for event in stream]
        message = await stream.get_final_message()
    open_index, num_blocks = None, 0
    for event in events:
        if event.type == "content_block_start":
            assert (open_index, event.index) == (None, num_blocks)
            open_index, num_blocks = event.index, num_blocks + 1
        elif event.type == "content_block_delta":
            assert event.index == open_index
        elif event.type == "content_block_stop":
            assert event.index == open_index
            open_index = None
    assert (open_index, num_blocks) == (None, len(message.content))
    return message


async def said(ask: Callable[..., Any], text: str, reason: str = "stop", more: str = "", **fields: Any) -> Message:
    """What the client gets when the model writes this text. `more`: the end of the template."""
    async with served(template=template("hermes", more)) as one, one.anthropic_client() as client:
        one.rig.card = replace(CARD, max_model_len=10_000)
        answer = asyncio.create_task(ask(client, **{**ASK, **fields}))
        await tell(one, text, reason)
        message: Message = await answer
    return message


def content_of(message: Message) -> list[tuple[Any, ...]]:
    """The blocks, without the ids of calls."""
    found: list[tuple[Any, ...]] = []
    for block in message.content:
        if block.type == "text":
            found.append(("text", block.text))
        elif block.type == "tool_use":
            found.append((block.name, block.input))
        else:
            assert block.type == "thinking"
            assert block.signature
            found.append(("thinking", block.thinking))
    return found


def results(message: Message) -> list[dict[str, Any]]:
    """Run the calls of a message; an error of a tool is its result."""
    found = []
    for block in message.content:
        if block.type != "tool_use":
            continue
        answer: dict[str, Any] = {"type": "tool_result", "tool_use_id": block.id}
        if block.name == "add":
            total = str(block.input["a"] + block.input["b"])  # type: ignore[operator]
            found.append({**answer, "content": [{"type": "text", "text": total}]})
        else:
            found.append({**answer, "content": "the clock is broken", "is_error": True})
    return found


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("name", MARKERS)
async def test_a_loop_of_tools(name: str, ask: Callable[..., Any]) -> None:
    texts = [before + written(name, calls) for before, calls in SCRIPT] + [DONE]
    async with served(template=template(name)) as one, one.anthropic_client() as client:
        messages: list[Any] = [{"role": "user", "content": "What is 1 + 2 + 4, and when?"}]
        ids: list[str] = []
        for turn, text in enumerate(texts):
            answer = asyncio.create_task(ask(client, **{**ASK, "messages": messages}))
            prompt = await tell(one, text)
            message = await answer
            if turn < len(SCRIPT):
                before, calls = SCRIPT[turn]
                got = content_of(message)
                assert [block[1].strip() for block in got if block[0] == "text"] == ([before.strip()] if before else [])
                assert got[len(got) - len(calls) :] == calls
                assert message.stop_reason == "tool_use"
            ids += [block.id for block in message.content if block.type == "tool_use"]
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": results(message)},
            ]
    assert (content_of(message), message.stop_reason) == ([("text", DONE)], "end_turn")
    assert len(set(ids)) == 3
    assert all(len(one_id) == 9 if name.startswith("mistral") else one_id.startswith("toolu_") for one_id in ids)
    # The last prompt has the tools, and all calls and results.
    function = {"name": "add", "description": ADD["description"], "parameters": ADD["input_schema"]}
    assert f"<tool>{json.dumps({'type': 'function', 'function': function})}</tool>" in prompt
    assert f'<call {ids[0]} add {{"a": 1, "b": 2}}>' in prompt
    assert f"[tool]3<of {ids[0]}>[tool]error: the clock is broken<of {ids[1]}>" in prompt
    assert f"[tool]7<of {ids[2]}>" in prompt


async def test_the_clients_own_loop_runs_tools() -> None:
    from anthropic import beta_async_tool

    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)

    async with served(template=template("hermes")) as one, one.anthropic_client() as client:
        messages: Any = [{"role": "user", "content": "What is 1 + 2?"}]
        # The client tries a thread on the server first.
        runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=200, messages=messages, tools=[add])
        answer = asyncio.create_task(runner.until_done())
        # The client tells the model of an input that does not fit, and goes on.
        await tell(one, written("hermes", [("add", {"a": 1})]))
        assert "[tool]error: " in await tell(one, written("hermes", [("add", {"a": 1, "b": 2})]))
        assert "[tool]3<of " in await tell(one, "It is 3.")
        message = await answer
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "It is 3."


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [("text", "")]),
        ("Hi", [("text", "Hi")]),
        (
            f"One. {written('hermes', [('add', {'a': 1, 'b': 2})])}\nTwo. {written('hermes', [('now', {})])}\nEnd",
            [("text", "One."), ("add", {"a": 1, "b": 2}), ("text", "Two."), ("now", {}), ("text", "End")],
        ),
        ("<tool_call>{}</tool_call>", [("text", "<tool_call>{}</tool_call>")]),
    ],
)
async def test_blocks_stand_in_the_order_of_the_text(
    ask: Callable[..., Any], text: str, expected: list[tuple[Any, ...]]
) -> None:
    assert content_of(await said(ask, text)) == expected


@pytest.mark.parametrize("cuts", [(), (5,), (30, 31), (1, 44, 60)])
async def test_inputs_come_as_they_are_written(cuts: Sequence[int]) -> None:
    text = written("hermes", [("add", {"a": 1, "b": 2})])
    places = [0, *cuts, len(text)]
    async with served(template=template("hermes")) as one, one.anthropic_client() as client:
        opening = asyncio.create_task(client.messages.create(**ASK, stream=True))
        call = await one.rig.next_call()
        pieces = [text[first:last] for first, last in pairwise(places)]
        call.tell(*(Chunk(place, (1,), piece) for place, piece in enumerate(pieces)), finished("stop"))
        events = [event async for event in await opening]
    assert [event.type for event in events if event.type != "content_block_delta"] == [
        *("message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop")
    ]
    begun = next(event.content_block for event in events if event.type == "content_block_start")
    assert begun.type == "tool_use"
    assert (begun.name, begun.input) == ("add", {})
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert {delta.type for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta.partial_json for delta in deltas)) == {"a": 1, "b": 2}


CUT = '<tool_call>{"name": "add", "arguments": {"a": 1, "b'
MALFORMED = '<tool_call>{"name": "add", "arguments": {"a": 1, oops}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "reason", "is_cut_at", "stop_reason", "after"),
    [
        (CUT, "length", '{"a": 1, "b', "max_tokens", []),
        (CUT, "stop", '{"a": 1, "b', "end_turn", []),
        (MALFORMED, "stop", '{"a": 1, ', "end_turn", [("text", "oops}}</tool_call>")]),
    ],
)
async def test_no_text_of_a_broken_call_is_lost(
    text: str, reason: str, is_cut_at: str, stop_reason: str, after: list[tuple[str, str]]
) -> None:
    message = await said(whole, text, reason)
    assert content_of(message) == [("add", {"INVALID_JSON": is_cut_at}), *after]
    assert message.stop_reason == stop_reason
    # In a stream the client has the same text in its events, and makes an input of what is whole in it.
    message = await said(streamed, text, reason)
    assert content_of(message) == [("add", {"a": 1}), *after]
    assert message.stop_reason == stop_reason


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_a_broken_call_goes_back_to_the_model_as_it_was(ask: Callable[..., Any]) -> None:
    async with served(template=template("hermes")) as one, one.anthropic_client() as client:
        answer = asyncio.create_task(ask(client, **ASK))
        await tell(one, MALFORMED)
        message = await answer
        result = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": "no JSON", "is_error": True}
        turns = [*ASK["messages"], {"role": "assistant", "content": message.content}]
        again = asyncio.create_task(ask(client, **{**ASK, "messages": [*turns, {"role": "user", "content": [result]}]}))
        prompt = await tell(one, DONE)
        await again
    assert "[tool]error: no JSON<of " in prompt
    assert ('INVALID_JSON": "{\\"a\\": 1, ' in prompt) == (ask is whole)


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize(
    ("choice", "tools"), [({"type": "any"}, {"add", "now"}), ({"type": "tool", "name": "now"}, {"now"})]
)
async def test_a_call_can_be_demanded(ask: Callable[..., Any], choice: Any, tools: set[str]) -> None:
    async with served(template=template("hermes")) as one, one.anthropic_client() as client:
        answer = asyncio.create_task(ask(client, **ASK, tool_choice={**choice, "disable_parallel_tool_use": True}))
        call = await one.rig.next_call()
        assert call.request is not None
        grammar = call.request.grammar or ""
        assert {name for name in ("add", "now") if f'\\"name\\": \\"{name}\\"' in grammar} == tools
        assert list(call.request.schemas) == [f"tools[{place}].input_schema" for place in range(2 - len(tools), 2)]
        call.tell(chunk(0, written("hermes", [("now", {}), ("now", {})])), finished("stop"))
        message = await answer
    assert [block.type for block in message.content] == ["tool_use", "text"], "one call, and the rest is text"
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        (None, "so\n</think>\n\nHi", [("thinking", "so"), ("text", "Hi")]),
        ({"type": "adaptive"}, "so</think>Hi", [("thinking", "so"), ("text", "Hi")]),
        (ENABLED, "so", [("thinking", "so")]),
        ({**ENABLED, "display": "omitted"}, "so</think>Hi", [("thinking", ""), ("text", "Hi")]),
        ({"type": "disabled"}, "Hi", [("text", "Hi")]),
        (
            ENABLED,
            "so</think>" + written("hermes", [("now", {})]),
            [("thinking", "so"), ("now", {})],
        ),
    ],
)
async def test_reasoning_is_thinking(
    ask: Callable[..., Any], thinking: Any, text: str, expected: list[tuple[str, Any]]
) -> None:
    fields = {} if thinking is None else {"thinking": thinking}
    assert content_of(await said(ask, text, more=THINKING, **fields)) == expected


async def test_thinking_goes_back_to_the_model() -> None:
    more = "{% for message in messages %}({{ message.reasoning_content }}){% endfor %}" + THINKING
    async with served(template=template("hermes", more)) as one, one.anthropic_client() as client:
        answer = asyncio.create_task(whole(client, **ASK, thinking=ENABLED))
        await tell(one, "so</think>" + written("hermes", [("now", {})]))
        message = await answer
        hidden: Any = {"type": "redacted_thinking", "data": "x"}
        turns = [
            *ASK["messages"],
            {"role": "assistant", "content": [hidden, *message.content]},
            {"role": "user", "content": results(message)},
        ]
        again = asyncio.create_task(whole(client, **{**ASK, "messages": turns}, thinking=ENABLED))
        assert "()(so)()<think>" in await tell(one, "</think>Hi")
        assert content_of(await again) == [("text", "Hi")]


async def test_the_tokens_of_tools_are_counted() -> None:
    async with served(template=template("hermes")) as one, one.anthropic_client() as client:
        fields = {name: ASK[name] for name in ("model", "messages", "tools")}
        counted = await client.messages.count_tokens(**fields)
        none = await client.messages.count_tokens(**fields, tool_choice={"type": "none"})
        answer = asyncio.create_task(whole(client, **ASK))
        prompt = await tell(one, DONE)
        await answer
    assert counted.input_tokens == len(prompt)
    assert none.input_tokens == len("[user]hi[assistant]")


async def test_what_is_not_served_is_refused_as_the_clients_exception() -> None:
    import anthropic

    async with served(template=template("hermes")) as one, one.anthropic_client() as client:
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].type: is 'web_search_20250305'"):
            await whole(client, **ASK | {"tools": [{"type": "web_search_20250305", "name": "web_search"}]})

"""OpenAI's own client calls tools in a loop, as agents do, against scripted texts in each format of calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from baton.messages.generation import Chunk
from tests.support.http_rig import finished
from tests.support.router_parts import MODEL
from tests.support.served_http import served
from tests.support.tool_formats import MARKERS, template, written
from tests.support.tool_loop import DONE, RUN, SCRIPT, tell

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletionMessage

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


async def whole(client: openai.AsyncOpenAI, messages: list[Any]) -> ChatCompletionMessage:
    answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
    return choice.message


async def streamed(client: openai.AsyncOpenAI, messages: list[Any]) -> ChatCompletionMessage:
    """The message that the client itself puts together from the deltas."""
    from openai.lib.streaming.chat import ContentDeltaEvent, FunctionToolCallArgumentsDoneEvent

    async with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
        events = [event async for event in stream]
        choice = (await stream.get_final_completion()).choices[0]
    message = choice.message
    assert choice.finish_reason == ("tool_calls" if message.tool_calls else "stop")
    assert "".join(event.delta for event in events if isinstance(event, ContentDeltaEvent)) == (message.content or "")
    done = [(event.name, event.arguments) for event in events if isinstance(event, FunctionToolCallArgumentsDoneEvent)]
    assert done == [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message


def results(message: ChatCompletionMessage) -> list[dict[str, Any]]:
    """Run the calls of a message; an error of a tool is its result."""
    found = []
    for call in message.tool_calls or ():
        assert call.type == "function"
        try:
            content = RUN[call.function.name](**json.loads(call.function.arguments))
        except OSError as error:
            content = f"error: {error}"
        found.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return found


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("name", MARKERS)
async def test_a_loop_of_tools(name: str, ask: Callable[..., Any]) -> None:
    texts = [before + written(name, calls) for before, calls in SCRIPT] + [DONE]
    async with served(template=template(name)) as one, one.client() as client:
        messages: list[Any] = [{"role": "user", "content": "What is 1 + 2 + 4, and when?"}]
        ids: list[str] = []
        for turn, text in enumerate(texts):
            answer = asyncio.create_task(ask(client, messages))
            prompt = await tell(one, text)
            message = await answer
            if turn < len(SCRIPT):
                before, calls = SCRIPT[turn]
                got = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
                assert (message.content or "").strip() == before.strip()
                assert got == calls
            ids += [call.id for call in message.tool_calls or ()]
            messages += [message.model_dump(exclude_none=True), *results(message)]
    assert message.content == DONE
    assert len(set(ids)) == 3
    assert all(len(one_id) == 9 for one_id in ids) or not name.startswith("mistral")
    # The last prompt has the tools, and all calls and results.
    assert f"<tool>{json.dumps(TOOLS[0])}</tool>" in prompt
    assert f'<call {ids[0]} add {{"a": 1, "b": 2}}>' in prompt
    assert f"[tool]3<of {ids[0]}>[tool]error: the clock is broken<of {ids[1]}>" in prompt
    assert f"[tool]7<of {ids[2]}>" in prompt


@pytest.mark.parametrize("cuts", [(), (5,), (30, 31), (1, 44, 60)])
async def test_arguments_come_as_they_are_written(cuts: Sequence[int]) -> None:
    text = written("hermes", [("add", {"a": 1, "b": 2})])
    places = [0, *cuts, len(text)]
    async with served(template=template("hermes")) as one, one.client() as client:
        asked = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], tools=TOOLS, stream=True
        )
        answer = asyncio.create_task(asked)
        call = await one.rig.next_call()
        pieces = [text[first:last] for first, last in pairwise(places)]
        call.tell(*(Chunk(place, (1,), piece) for place, piece in enumerate(pieces)), finished("stop"))
        deltas = [event.choices[0].delta async for event in await answer]
    calls = [part for delta in deltas for part in delta.tool_calls or ()]
    first, *more = calls
    assert first.function is not None
    assert (first.index, first.type, first.function.name) == (0, "function", "add")
    assert first.id is not None
    assert all((part.index, part.id, part.type) == (0, None, None) for part in more)
    assert all(part.function is not None and part.function.name is None for part in more)
    assert json.loads("".join(part.function.arguments for part in calls)) == {"a": 1, "b": 2}  # type: ignore[union-attr, misc]
    assert not any(delta.content for delta in deltas)


async def test_a_call_that_is_cut_off_ends_with_length() -> None:
    async with served(template=template("hermes")) as one, one.client() as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        answer = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS))
        await tell(one, '<tool_call>{"name": "add", "arguments": {"a": 1', "length")
        choice = (await answer).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1'  # type: ignore[union-attr]

"""OpenAI's own client calls tools over /v1/responses, as agents do, against scripted texts in each format of calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from baton.messages.generation import Chunk
from tests.support.http_rig import chunk, finished
from tests.support.router_parts import MODEL
from tests.support.served_http import Served, served
from tests.support.tool_formats import MARKERS, template, written
from tests.support.tool_loop import DONE, RUN, SCRIPT, tell

if TYPE_CHECKING:
    import openai
    from openai.types.responses import Response, ResponseFunctionToolCall

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS: Any = [
    {"type": "function", "name": "add", "description": "Adds.", "parameters": NUMBERS, "strict": False},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
OPEN = "{# </think> #}<think>\n"
CALL = written("hermes", [("add", {"a": 1, "b": 2})])
CUT = '<tool_call>{"name": "add", "arguments": {"a": 1'


@asynccontextmanager
async def clients(name: str = "hermes", more: str = "") -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    """A served front, and a client that refuses answers and events which its models do not describe."""
    import openai

    async with served(template=template(name, more)) as one:
        url = f"http://127.0.0.1:{one.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", _strict_response_validation=True) as client:
            yield one, client


async def whole(client: openai.AsyncOpenAI, **fields: Any) -> Response:
    response: Response = await client.responses.create(model=MODEL, **fields)
    return response


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> Response:
    """The response at the end of a stream, which the deltas say, too."""
    async with client.responses.stream(model=MODEL, **fields) as stream:
        events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response: Response = events[-1].response
    deltas: dict[str, str] = {item.id or "": "" for item in response.output}
    texts: dict[str, str] = {}
    for event in events:
        if event.type in _DELTAS:
            deltas[event.item_id] += event.delta
        if event.type == "response.output_item.done":
            texts[event.item.id or ""] = text_of(event.item)
    assert deltas == texts == {item.id: text_of(item) for item in response.output}
    return response


_DELTAS = (
    "response.output_text.delta",
    "response.reasoning_text.delta",
    "response.function_call_arguments.delta",
)


def text_of(item: Any) -> str:
    if item.type == "function_call":
        return str(item.arguments)
    (part,) = item.content
    return str(part.text)


def told(response: Response) -> list[tuple[str, str, str]]:
    """The type of each item, its text, and its status."""
    return [(item.type, text_of(item), str(item.status)) for item in response.output]  # type: ignore[union-attr]


def calls_of(response: Response) -> list[ResponseFunctionToolCall]:
    return [item for item in response.output if item.type == "function_call"]


def results(response: Response) -> list[dict[str, Any]]:
    """Run the calls of a response; an error of a tool is its output."""
    found = []
    for call in calls_of(response):
        try:
            output: Any = [{"type": "input_text", "text": RUN[call.name](**json.loads(call.arguments))}]
        except OSError as error:
            output = f"error: {error}"
        found.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    return found


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("name", MARKERS)
async def test_a_loop_of_tools(name: str, is_stored: bool, ask: Callable[..., Any]) -> None:
    texts = [before + written(name, calls) for before, calls in SCRIPT] + [DONE]
    async with clients(name) as (one, client):
        given: list[Any] = [{"role": "user", "content": "What is 1 + 2 + 4, and when?"}]
        call_ids: list[str] = []
        more: dict[str, Any] = {}
        for turn, text in enumerate(texts):
            answer = asyncio.create_task(ask(client, input=given, tools=TOOLS, store=is_stored, **more))
            prompt = await tell(one, text)
            response = await answer
            assert response.status == "completed"
            called = calls_of(response)
            if turn < len(SCRIPT):
                before, calls = SCRIPT[turn]
                assert response.output_text.strip() == before.strip()
                assert [(call.name, json.loads(call.arguments)) for call in called] == calls
                assert response.output[0].type == ("message" if before else "function_call")
            call_ids += [call.call_id for call in called]
            if is_stored:
                given, more = results(response), {"previous_response_id": response.id}
            else:
                given = [*given, *response.output, *results(response)]
    assert response.output_text == DONE
    assert len(set(call_ids)) == len(call_ids)
    assert all(len(one_id) == 9 for one_id in call_ids) or not name.startswith("mistral")
    # The last prompt has the tools, and all calls and results; calls are in the message of the text before them.
    function = {"name": "add", "description": "Adds.", "parameters": NUMBERS}
    assert f"<tool>{json.dumps({'type': 'function', 'function': function})}</tool>" in prompt
    first, second, third = call_ids
    assert f'[assistant]I look.<call {first} add {{"a": 1, "b": 2}}><call {second} now {{}}>[tool]3' in prompt
    assert f"[tool]3<of {first}>[tool]error: the clock is broken<of {second}>[assistant]<call" in prompt
    assert f"[tool]7<of {third}>" in prompt


async def test_events_come_in_the_order_of_the_text() -> None:
    async with clients("hermes", OPEN) as (one, client):
        asked = client.responses.create(model=MODEL, input="hi", tools=TOOLS, stream=True)
        opening = asyncio.create_task(asked)
        await tell(one, f"so</think>a{CALL}{CALL}")
        events: list[Any] = [event async for event in await opening]
    kinds = [event.type for event in events if not event.type.endswith(".delta")]
    item = ["response.output_item.added", "response.content_part.added"]
    ended = ["response.content_part.done", "response.output_item.done"]
    call = ["response.output_item.added", "response.function_call_arguments.done", "response.output_item.done"]
    assert kinds == [
        *("response.created", "response.in_progress"),
        *(*item, "response.reasoning_text.done", *ended, *item, "response.output_text.done", *ended, *call, *call),
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1, 2, 3]
    assert [event.item.type for event in added] == ["reasoning", "message", "function_call", "function_call"]
    assert all(event.item.status == "in_progress" for event in added)
    assert added[2].item.arguments == ""
    place = {event.item.id: event.output_index for event in added}
    assert all(place[event.item_id] == event.output_index for event in events if hasattr(event, "item_id"))
    last = events[-1].response
    assert told(last) == [
        ("reasoning", "so", "completed"),
        ("message", "a", "completed"),
        ("function_call", '{"a": 1, "b": 2}', "completed"),
        ("function_call", '{"a": 1, "b": 2}', "completed"),
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [one.model_dump() for one in done] == [one.model_dump() for one in last.output]
    assert [event.arguments for event in events if event.type.endswith("arguments.done")] == ['{"a": 1, "b": 2}'] * 2


@pytest.mark.parametrize("cuts", [(), (5,), (30, 31), (1, 44, 60)])
async def test_arguments_come_as_they_are_written(cuts: Sequence[int]) -> None:
    text = f"a{CALL}b"
    places = [0, *cuts, len(text)]
    async with clients() as (one, client):
        answer = asyncio.create_task(streamed(client, input="hi", tools=TOOLS))
        call = await one.rig.next_call()
        pieces = [text[first:last] for first, last in pairwise(places)]
        call.tell(*(Chunk(place, (1,), piece) for place, piece in enumerate(pieces)), finished("stop"))
        assert told(await answer) == [
            ("message", "a", "completed"),
            ("function_call", '{"a": 1, "b": 2}', "completed"),
            ("message", "b", "completed"),
        ]


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize(
    ("text", "reason", "items"),
    [
        (f"a{CUT}", "length", [("message", "a", "completed"), ("function_call", '{"a": 1', "incomplete")]),
        (f"a{CUT}", "stop", [("message", "a", "completed"), ("function_call", '{"a": 1', "incomplete")]),
        # What follows malformed arguments is text again, in which further calls are found.
        (
            f"{CUT},,}} b{CALL}",
            "stop",
            [
                ("function_call", '{"a": 1,', "incomplete"),
                ("message", ",} b", "completed"),
                ("function_call", '{"a": 1, "b": 2}', "completed"),
            ],
        ),
        # What is no call up to its arguments is text as a whole.
        ('<tool_call>{"name": "ad', "length", [("message", '<tool_call>{"name": "ad', "incomplete")]),
        ('<tool_call>{"nam" 1}b', "stop", [("message", '<tool_call>{"nam" 1}b', "completed")]),
        ("<think>a", "length", [("reasoning", "a", "incomplete")]),
        ("<think>a</think>", "stop", [("reasoning", "a", "completed")]),
        ("", "stop", [("message", "", "completed")]),
    ],
)
async def test_no_text_of_a_malformed_or_cut_off_answer_is_lost(
    text: str, reason: str, items: list[tuple[str, str, str]], ask: Callable[..., Any]
) -> None:
    async with clients("hermes", THINKING) as (one, client):
        answer = asyncio.create_task(ask(client, input="hi", tools=TOOLS))
        await tell(one, text, reason)
        response = await answer
        assert told(response) == items
        assert response.status == ("incomplete" if reason == "length" else "completed")
        # The response is stored with all items, and the conversation goes on.
        assert told(await client.responses.retrieve(response.id)) == items
        more = asyncio.create_task(whole(client, input="more", previous_response_id=response.id))
        prompt = await tell(one, "so")
        assert (await more).status == "completed"
        assert prompt.endswith("[user]more[assistant]")
        listed = [item async for item in await client.responses.input_items.list(response.id)]
        assert [item.type for item in listed] == ["message"]


async def test_a_call_of_a_pydantic_tool_is_parsed() -> None:
    import openai

    class Add(BaseModel):
        a: int
        b: int

    tool = openai.pydantic_function_tool(Add, name="add")["function"]
    tools: Any = [{"type": "function", **tool}]
    async with clients() as (one, client):
        answer = asyncio.create_task(client.responses.parse(model=MODEL, input="hi", tools=tools))
        await tell(one, CALL)
        (call,) = (await answer).output
    assert call.type == "function_call"
    assert call.parsed_arguments == {"a": 1, "b": 2}


def allowed(mode: str, name: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name}]}


@pytest.mark.parametrize(
    ("choice", "offered", "demanded"),
    [
        ("none", [], []),
        ("auto", ["add", "now"], []),
        ("required", ["add", "now"], ["add", "now"]),
        ({"type": "function", "name": "now"}, ["add", "now"], ["now"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}, ["now"], []),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
            ["add"],
            ["add"],
        ),
    ],
)
async def test_the_choice_of_a_tool_reaches_the_core(choice: Any, offered: list[str], demanded: list[str]) -> None:
    async with clients() as (one, client):
        asked = whole(client, input="hi", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        answer = asyncio.create_task(asked)
        call = await one.rig.next_call()
        assert call.request is not None
        call.tell(chunk(0, written("hermes", [("now", {})])), finished("stop"))
        response = await answer
    prompt = "".join(map(chr, call.request.prompt))  # type: ignore[arg-type]
    assert [name for name in ("add", "now") if f'"name": "{name}"' in prompt] == offered
    grammar = call.request.grammar or ""
    assert [name for name in ("add", "now") if f'\\"name\\": \\"{name}\\"' in grammar] == demanded
    assert set(call.request.schemas) == {f"tools[{('add', 'now').index(name)}].parameters" for name in demanded}
    assert [item.type for item in response.output] == ["function_call" if offered else "message"]
    dumped = response.tool_choice if isinstance(response.tool_choice, str) else response.tool_choice.model_dump()
    assert dumped == choice
    assert [tool.name for tool in response.tools] == ["add", "now"]  # type: ignore[union-attr]
    assert response.parallel_tool_calls is False


async def test_with_one_call_at_most_further_ones_are_text() -> None:
    async with clients() as (one, client):
        answer = asyncio.create_task(whole(client, input="hi", tools=TOOLS, parallel_tool_calls=False))
        await tell(one, CALL + CALL)
        assert [item.type for item in (await answer).output] == ["function_call", "message"]


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_reasoning_comes_back_as_an_item(ask: Callable[..., Any]) -> None:
    more = "{% for message in messages if message.reasoning_content %}<was {{ message.reasoning_content }}>{% endfor %}"
    async with clients("hermes", more + THINKING) as (one, client):
        answer = asyncio.create_task(ask(client, input="hi", reasoning={"effort": "high", "summary": "auto"}))
        await tell(one, "<think>\nI think.\n</think>\n\nYes.")
        response = await answer
        assert told(response) == [("reasoning", "I think.", "completed"), ("message", "Yes.", "completed")]
        assert response.reasoning is not None
        assert response.reasoning.effort == "high"
        given: list[Any] = [{"role": "user", "content": "hi"}, *response.output, {"role": "user", "content": "more"}]
        asked = ask(client, input=given, reasoning={"effort": "none"}, store=False)
        answer = asyncio.create_task(asked)
        prompt = await tell(one, "No.")
        assert told(await answer) == [("message", "No.", "completed")]
    assert prompt == "[user]hi[assistant]Yes.[user]more[assistant]<was I think.><think></think>"


async def test_a_lost_conversation_is_told_and_an_unknown_call_refused() -> None:
    import openai

    output: Any = [{"type": "function_call_output", "call_id": "call_x", "output": "3"}]
    async with clients() as (_, client):
        with pytest.raises(openai.NotFoundError) as lost:
            await whole(client, input=output, tools=TOOLS, previous_response_id="resp_x")
        assert lost.value.code == "previous_response_not_found"
        with pytest.raises(openai.BadRequestError, match="the call 'call_x', which is not in the conversation"):
            await whole(client, input=output, tools=TOOLS)

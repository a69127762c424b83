"""Tools and reasoning in OpenAI's API of responses: hostile bodies, conversations with calls, and what is stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.messages.generation import Chunk
from baton.messages.request_limits import MAX_REQUEST_BYTES, MAX_TOOLS
from baton.messages.sampling import TokenLogprobs
from router.http.responses.items import CallItem, CallOutputItem, Item, MessageItem, ReasoningItem, template_messages
from tests.support.http_rig import BOUNDS, CARD, RESPONSES, HttpRig, chunk, finished, text_of
from tests.support.router_parts import MODEL
from tests.support.tool_formats import template, written

F = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
HELLO: dict[str, Any] = {"model": MODEL, "input": "hi", "tools": [F]}
ASKED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RETURNED = {"type": "function_call_output", "call_id": "c1", "output": "3"}
IMAGE = {"type": "input_image", "image_url": "x"}
DEEP: Any = {}
for _ in range(20):
    DEEP = {"properties": {"x": DEEP}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


def returned(output: Any) -> dict[str, Any]:
    return {"input": [ASKED, RETURNED | {"output": output}]}


def rig_with_tools(**more: Any) -> HttpRig:
    return HttpRig(template=template("hermes"), **more)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        # Tools
        ({"tools": {}}, "tools", "must be"),
        ({"tools": [1]}, "tools[0]", "must be"),
        ({"tools": [{}]}, "tools[0].type", "is required"),
        ({"tools": [{"type": 1}]}, "tools[0].type", "must be"),
        ({"tools": [{"type": "web_search"}]}, "tools", "at 0, a tool of the type 'web_search'; only functions are"),
        ({"tools": [F, {"type": "x" * 1000}]}, "tools", "at 1, a tool of the type 'xxxx"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is required"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function", "is unknown"),
        ({"tools": [F | {"name": "no name"}]}, "tools[0].name", "must be 1 to 64 letters"),
        ({"tools": [F | {"name": "x" * 65}]}, "tools[0].name", "must be 1 to 64 letters"),
        ({"tools": [F | {"strict": "yes"}]}, "tools[0].strict", "must be"),
        ({"tools": [F | {"defer_loading": True}]}, "tools[0].defer_loading", "must be"),
        ({"tools": [F | {"output_schema": {"type": "string"}}]}, "tools[0].output_schema", "is not served"),
        ({"tools": [F | {"more": 1}]}, "tools[0].more", "is unknown"),
        ({"tools": [F, F]}, "tools", "has f twice"),
        ({"tools": [F] * (MAX_TOOLS + 1)}, "tools", f"at most {MAX_TOOLS} are taken"),
        ({"tools": [F | {"parameters": {"type": "array"}}]}, "tools[0].parameters", "must be the schema of an object"),
        ({"tools": [F | {"parameters": DEEP}]}, "tools[0].parameters", "levels"),
        ({"tools": [F | {"parameters": {"title": "x" * 70_000}}]}, "tools[0].parameters", "bytes"),
        # The choice among them
        ({"tool_choice": "any"}, "tool_choice", "must be none, auto, required"),
        ({"tool_choice": 1}, "tool_choice", "must be none, auto, required"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "an object of the type function or allowed_tools"),
        ({"tool_choice": {"type": ["x"]}}, "tool_choice", "an object of the type function or allowed_tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice: name: is required"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "is g, which is none of the tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
        ({"tool_choice": allowed("auto")}, "tool_choice.tools", "is empty"),
        ({"tool_choice": allowed("any")}, "tool_choice", "tool_choice: mode: must be"),
        ({"tool_choice": allowed("auto", "g")}, "tool_choice.tools", "has g, which is none of the tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "must be"),
        ({"include": ["message.output_text.logprobs"]}, "include", "does not go with tools that may be called"),
        # Reasoning
        ({"reasoning": 1}, "reasoning", "must be"),
        ({"reasoning": {"effort": "max"}}, "reasoning.effort", "must be"),
        ({"reasoning": {"x": 1}}, "reasoning.x", "is unknown"),
        # Items
        ({"input": [ASKED | {"call_id": None}]}, "input", "item 0: call_id: must be a string"),
        ({"input": [ASKED | {"call_id": "x" * 257}]}, "input", "item 0: call_id: must be a string of 1 to 256"),
        ({"input": [ASKED | {"call_id": 1}]}, "input", "item 0: call_id: must be a string"),
        ({"input": [ASKED | {"name": "no name"}]}, "input", "item 0: name: must be 1 to 64 letters"),
        ({"input": [ASKED | {"arguments": {}}]}, "input", "item 0: arguments: must be"),
        ({"input": [ASKED | {"namespace": "x"}]}, "input", "item 0: namespace: is not served"),
        ({"input": [ASKED | {"x" * 10_000: "x"}]}, "input", "is unknown"),
        ({"input": [{"type": "function_call"}]}, "input", "item 0: call_id: is required"),
        ({"input": [RETURNED]}, "input", "has the output of the call 'c1', which is not in the conversation"),
        ({"input": [RETURNED, ASKED]}, "input", "has the output of the call 'c1', which is not in the conversation"),
        (returned([IMAGE]), "input", "item 1: output: part 0 is of the type 'input_im"),
        (returned([1]), "input", "item 1: output: part 0 has no type"),
        (returned(None), "input", "item 1: output: must be a string or a list of text"),
        (returned({}), "input", "item 1: output: must be a string or a list of text"),
        ({"input": [ASKED] * (MAX_TOOLS + 1)}, "input", f"has more than {MAX_TOOLS} calls that follow each other"),
        ({"input": [{"type": "reasoning", "content": [{"type": "x"}]}]}, "input", "item 0: content[0].type: must be"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "encrypted_content: is not served"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item 0 is of the type 'item_reference'"),
        ({"input": [{"type": "custom_tool_call"}]}, "input", "item 0 is of the type 'custom_tool_call'"),
    ],
)
async def test_a_wrong_body_is_refused_by_its_field(fields: dict[str, Any], param: str, says: str) -> None:
    refused = await rig_with_tools().refused(RESPONSES, HELLO | fields, param, says)
    assert len(refused.error["message"]) < 1000


async def test_tools_of_a_model_that_calls_none_are_refused_unless_none_may_be_called() -> None:
    await HttpRig().refused(RESPONSES, HELLO, "tools")
    assert not (await HttpRig().asked(RESPONSES, HELLO | {"tool_choice": "none"})).is_parsed


async def test_the_response_says_which_tools_there_were() -> None:
    rig = rig_with_tools()
    exchange = await rig.answered(
        RESPONSES, HELLO | {"tool_choice": {"type": "function", "name": "f"}}, chunk(0, "x"), finished("stop")
    )
    found = exchange.json
    assert found["tools"] == [F | {"description": None, "strict": None}]
    assert (found["tool_choice"], found["reasoning"]) == (
        {"type": "function", "name": "f"},
        {"effort": None, "summary": None},
    )


def test_what_the_model_wrote_in_one_turn_is_one_message() -> None:
    items: list[Item] = [
        MessageItem("1", ("q",), "user"),
        ReasoningItem("2", ("r", "s")),
        ReasoningItem("3", ("t",)),
        MessageItem("4", ("a", "b"), "assistant"),
        CallItem("5", ('{"x": 1}',), "c1", "f"),
        CallItem("6", ("{",), "c2", "g"),
        MessageItem("7", ("c",), "assistant"),
        CallOutputItem("8", ("3",), "c1"),
        CallOutputItem("9", ("4", "5"), "c2"),
        ReasoningItem("10", ("u",)),
        MessageItem("11", ("d",), "assistant"),
        MessageItem("12", ("e",), "assistant"),
        ReasoningItem("13", ("v",)),
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{"}},
    ]
    assert template_messages("s", items) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a\nb\nc", "reasoning_content": "r\ns\nt", "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "4\n5", "tool_call_id": "c2"},
        {"role": "assistant", "content": "d", "reasoning_content": "u"},
        {"role": "assistant", "content": "e"},
        {"role": "assistant", "content": "", "reasoning_content": "v"},
    ]
    assert template_messages(None, [CallItem("1", ("",), "c1", "f")])[0]["role"] == "assistant"


async def test_a_summary_stands_in_for_reasoning_that_is_not_there() -> None:
    more = "{% for message in messages %}{{ message.reasoning_content }}{% endfor %}"
    rig = HttpRig(template=template("hermes", more))
    summary = [{"type": "summary_text", "text": "so"}]
    given = [{"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": None}]
    assert text_of((await rig.asked(RESPONSES, HELLO | {"input": given})).prompt).endswith("so")


async def test_stored_items_are_listed_with_their_calls() -> None:
    rig = rig_with_tools()
    given = [{"role": "user", "content": "q"}, ASKED | {"status": "incomplete", "id": "fc_x"}, RETURNED]
    exchange = await rig.answered(
        RESPONSES, HELLO | {"input": given}, chunk(0, written("hermes", [("f", {})])), finished("stop")
    )
    made = exchange.json
    (call,) = made["output"]
    name = made["id"].removeprefix("resp_")
    assert call["id"] == f"fc_{name}_3"
    exchange = await rig.answered(
        RESPONSES, HELLO | {"input": "more", "previous_response_id": made["id"]}, chunk(0, "x"), finished("stop")
    )
    more = exchange.json
    listed = (await rig.get(f"{RESPONSES}/{more['id']}/input_items", "order=asc").end()).json["data"]
    assert listed == [
        {
            "id": f"msg_{name}_0",
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": "q"}],
        },
        ASKED | {"id": f"fc_{name}_1", "status": "incomplete"},
        RETURNED | {"id": f"fco_{name}_2", "status": "completed"},
        call,
        listed[-1],
    ]
    stored = rig.store.find("", more["id"])
    assert stored is not None
    assert stored.num_bytes > 6 * 512, "calls and outputs count"


async def test_a_conversation_with_calls_is_bounded() -> None:
    rig = rig_with_tools(bounds=replace(BOUNDS, stored_response_memory=4000))
    exchange = await rig.answered(
        RESPONSES,
        HELLO | {"input": [ASKED, RETURNED | {"output": "x" * 100}]},
        chunk(0, written("hermes", [("f", {"x": 1})]) * 4),
        finished("stop"),
    )
    made = exchange.json
    assert len(made["output"]) == 4
    assert (await rig.get(f"{RESPONSES}/{made['id']}").end()).status == 404
    assert (rig.store.stats().num_responses, rig.store.stats().evicted) == (0, 1)


async def test_a_small_request_that_continues_a_large_conversation_is_read_in_a_thread() -> None:
    rig = rig_with_tools()
    responses = []
    for given in ("x" * 20_000, "x"):
        exchange = await rig.answered(RESPONSES, HELLO | {"input": given}, chunk(0, "x"), finished("stop"))
        responses.append(exchange.json["id"])
    assert rig.handler.num_in_threads == 2, "to parse the large body, and to read it"
    for previous, num_in_threads in zip(responses, (3, 3), strict=True):
        rig.post(RESPONSES, HELLO | {"previous_response_id": previous})
        await rig.next_call()
        assert rig.handler.num_in_threads == num_in_threads


async def test_a_conversation_has_no_more_text_than_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_with_tools()
    rig.card = replace(CARD, max_model_len=2 * MAX_REQUEST_BYTES)
    exchange = await rig.answered(
        RESPONSES,
        HELLO | {"input": [ASKED | {"arguments": "x" * (MAX_REQUEST_BYTES // 2)}]},
        chunk(0, "x"),
        finished("stop"),
    )
    made = exchange.json
    parsed: list[str] = []
    monkeypatch.setattr("router.http.responses.items.arguments_of", parsed.append)
    more = HELLO | {"previous_response_id": made["id"], "input": "x" * (MAX_REQUEST_BYTES // 2)}
    await rig.refused(
        RESPONSES, more, "input", f"{MAX_REQUEST_BYTES + 1} bytes of text; at most {MAX_REQUEST_BYTES} are taken"
    )
    assert not parsed
    rig.post(RESPONSES, more | {"input": "x" * (MAX_REQUEST_BYTES // 2 - 1)})
    assert (await rig.next_call()).request is not None
    assert parsed


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_reasoning_come_with_the_message(stream: bool) -> None:
    rig = HttpRig(template=template("hermes", "{# </think> #}"))
    asked = {"include": ["message.output_text.logprobs"], "stream": stream, "tools": []}
    exchange = rig.post(RESPONSES, HELLO | asked)
    pieces = ["<think>", "a", "</think>", "b", ""]
    positions = [(TokenLogprobs(97 + place, -0.5, 1, ()),) for place in range(len(pieces))]
    chunks = [Chunk(place, (1,), piece, positions[place]) for place, piece in enumerate(pieces)]
    (await rig.next_call()).tell(*chunks, finished("stop"))
    await exchange.end()
    response = exchange.events[-1].json["response"] if stream else exchange.json
    reasoning, message = response["output"]
    assert "logprobs" not in reasoning["content"][0]
    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == list("abcde")
    if stream:
        deltas = [event.json for event in exchange.events if event.name == "response.output_text.delta"]
        assert [entry["token"] for delta in deltas for entry in delta["logprobs"]] == list("abcde")


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_the_tokens_of_reasoning(stream: bool) -> None:
    rig = HttpRig(template=template("hermes", "{# </think> #}"))
    exchange = await rig.answered(
        RESPONSES,
        HELLO | {"stream": stream, "tools": []},
        chunk(0, "<think>so"),
        chunk(9, "</think>Hi"),
        finished("stop", 19),
    )
    response = exchange.events[-1].json["response"] if stream else exchange.json
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len("<think>so</think>")}


@pytest.mark.parametrize("strict", [True, False, None])
async def test_calls_of_strict_functions_that_may_come_are_a_grammar(strict: bool | None) -> None:
    request = await rig_with_tools().asked(RESPONSES, HELLO | {"tools": [F | {"strict": strict}]})
    assert (request.grammar is not None) == (strict is True)
    assert request.constraint_field == ("tools[0].strict" if strict else "")

"""OpenAI's API of responses over a scripted request handler: bodies, answers, events and what is stored."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.errors import Draining
from baton.messages.generation import Chunk
from baton.messages.sampling import SamplingDefaults, TokenLogprobs
from router.admission.sampling import longest_answer
from tests.support.http_client import Exchange
from tests.support.http_rig import BOUNDS, CARD, RESPONSES, STREAM, HttpRig, authenticator, chunk, finished, text_of
from tests.support.router_parts import MODEL

HELLO: dict[str, Any] = {"model": MODEL, "input": "hi"}


async def answered(rig: HttpRig, fields: dict[str, Any], text: str = "cd", reason: str = "stop") -> Exchange:
    return await rig.answered(RESPONSES, HELLO | fields, chunk(0, text), finished(reason))


async def test_a_response_is_returned_whole() -> None:
    """Literal: a command writes the answers in tests/outside anew."""
    exchange = await answered(HttpRig(), {})
    found = exchange.json
    assert exchange.status == 200
    assert found["id"].startswith("resp_")
    (item,) = found.pop("output")
    assert item == {
        "id": f"msg_{found.pop('id').removeprefix('resp_')}_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "cd", "annotations": [], "logprobs": []}],
    }
    assert found == {
        "object": "response",
        "created_at": 5,
        "completed_at": 5,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": MODEL,
        "usage": {
            "input_tokens": 3,
            "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 5,
        },
        "background": False,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }


async def test_a_response_says_the_models_own_values_where_the_request_has_none() -> None:
    rig = HttpRig(card=replace(CARD, defaults=SamplingDefaults(temperature=0.7, top_p=0.9)))
    found = (await answered(rig, {"top_p": 0.5})).json
    assert (found["temperature"], found["top_p"]) == (0.7, 0.5)


async def test_the_type_of_a_message_may_be_null_and_nothing_else() -> None:
    item = {"type": None, "role": "user", "content": "hi"}
    assert (await answered(HttpRig(), {"input": [item]})).status == 200
    wrong = HELLO | {"input": [item | {"type": 3}]}
    await HttpRig().refused(RESPONSES, wrong, "input", "item 0 is of a type that is no text")


async def test_every_field_reaches_the_core_or_the_answer() -> None:
    rig = HttpRig()
    schema = {"type": "object", "properties": {}}
    sampling = {"temperature": 0.5, "top_p": 0.9, "seed": 4, "priority": -2, "cache_salt": "s"}
    shown = {
        "metadata": {"a": "b"},
        "user": "me",
        "instructions": "be brief",
        "max_output_tokens": 7,
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "tool_choice": "none",
        "parallel_tool_calls": False,
    }
    wanted = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    exchange = rig.post(RESPONSES, HELLO | sampling | shown | {"text": {"format": wanted}, "tools": []})
    call = await rig.next_call()
    call.tell(chunk(0, "{}"), finished("stop"))
    assert {name: getattr(call.request, name) for name in sampling} == sampling
    assert (call.request.max_tokens, call.request.model) == (7, MODEL)
    assert json.loads(call.request.json_schema or "") == schema
    assert text_of(call.request.prompt) == "system: be brief\nuser: hi\nassistant:"
    found = (await exchange.end()).json
    assert {name: found[name] for name in shown} == shown
    assert found["text"]["format"] == {**wanted, "description": None}
    assert (found["temperature"], found["top_p"]) == (0.5, 0.9)


async def test_a_list_of_messages_becomes_the_conversation() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "phase": "final_answer",
            "content": [
                {"type": "output_text", "text": "b", "annotations": [], "logprobs": []},
                {"type": "output_text", "text": "c", "annotations": []},
            ],
        },
        {"role": "user", "content": "e"},
    ]
    request = await HttpRig().asked(RESPONSES, HELLO | {"input": items})
    assert text_of(request.prompt) == "system: d\nuser: a\nassistant: b\nc\nuser: e\nassistant:"


async def test_a_response_that_is_cut_by_its_length_is_incomplete() -> None:
    found = (await answered(HttpRig(), {}, reason="length")).json
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (found["output"][0]["status"], found["completed_at"]) == ("incomplete", None)


@pytest.mark.parametrize(("reason", "last"), [("stop", "response.completed"), ("length", "response.incomplete")])
async def test_a_response_is_streamed_as_numbered_events(reason: str, last: str) -> None:
    rig = HttpRig()
    exchange = rig.post(RESPONSES, HELLO | STREAM)
    # The second chunk's token completes no character.
    (await rig.next_call()).tell(chunk(0, "c"), Chunk(1, (1,), ""), chunk(2, "é"), finished(reason))
    events = (await exchange.end()).events
    assert all(event.name == event.json["type"] for event in events)
    assert [event.json["sequence_number"] for event in events] == list(range(10))
    assert [event.name for event in events] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.delta", "response.output_text.done"),
        *("response.content_part.done", "response.output_item.done", last),
    ]
    assert [event.json["delta"] for event in events[4:6]] == ["c", "é"]
    assert events[6].json["text"] == events[7].json["part"]["text"] == "cé"
    begun, whole = events[0].json["response"], events[-1].json["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert events[8].json["item"] == whole["output"][0]
    assert {event.json["item_id"] for event in events[3:8]} == {whole["output"][0]["id"]}
    assert (await rig.get(f"{RESPONSES}/{begun['id']}").end()).json == whole


async def test_a_streamed_response_equals_the_whole_one() -> None:
    whole = (await answered(HttpRig(), {})).json
    streamed = (await answered(HttpRig(), STREAM)).events[-1].json["response"]
    assert streamed == whole


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_included_if_requested(stream: bool) -> None:
    rig = HttpRig()
    body = HELLO | {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": stream}
    assert (await rig.asked(RESPONSES, body)).logprobs == 2
    positions = (TokenLogprobs(99, -0.5, 1, ((99, -0.5), (100, -1.5))),)
    exchange = await rig.answered(RESPONSES, body, Chunk(0, (99,), "c", positions), finished())
    response = exchange.events[-1].json["response"] if stream else exchange.json
    (entry,) = response["output"][0]["content"][0]["logprobs"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("c", -0.5, [99])
    assert [top["token"] for top in entry["top_logprobs"]] == ["c", "d"]
    if stream:
        assert exchange.events[4].json["logprobs"] == [entry]


async def num_turns(num_tokens: int) -> int:
    """The turns of the event loop in which a response with so many log-probabilities is written."""
    rig = HttpRig()
    exchange = rig.post(RESPONSES, HELLO | {"include": ["message.output_text.logprobs"], "top_logprobs": 2})
    positions = (TokenLogprobs(99, -0.5, 1, ((99, -0.5), (100, -1.5))),) * num_tokens
    (await rig.next_call()).tell(Chunk(0, (99,) * num_tokens, "c" * num_tokens, positions), finished())
    turns = 0
    while not exchange.task.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(exchange.json["output"][0]["content"][0]["logprobs"]) == num_tokens
    return turns


async def test_a_response_without_a_length_is_as_long_as_its_log_probabilities_permit() -> None:
    rig = HttpRig(card=replace(CARD, max_model_len=131_072))
    body = HELLO | {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    assert (await rig.asked(RESPONSES, body)).max_tokens == longest_answer(rig.card, 0, 1, 20) < 131_000


async def test_other_requests_get_their_turns_while_long_log_probabilities_are_written() -> None:
    assert await num_turns(6400) - await num_turns(1) >= 90


async def test_an_error_in_mid_stream_is_told_by_an_event_and_the_failed_response() -> None:
    rig = HttpRig(keep_alive_s=0.01)
    exchange = rig.post(RESPONSES, HELLO | STREAM)
    call = await rig.next_call()
    await exchange.wait_for_body(b": waiting\n\n: waiting\n\n")
    call.tell(chunk(0, "c"), Draining("bye"))
    *_, told, failed = (await exchange.end()).events
    assert (told.name, told.json["code"], told.json["message"]) == ("error", "overloaded", "bye")
    assert failed.name == "response.failed"
    assert failed.json["response"]["error"] == {"code": "server_error", "message": "bye"}
    assert failed.json["sequence_number"] == told.json["sequence_number"] + 1
    assert (await rig.get(f"{RESPONSES}/{failed.json['response']['id']}").end()).status == 404


PNG = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": None}, "input", "must be a string or a list"),
        ({"input": []}, "input", "must be a string or a list"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item 0 is of the type 'item_reference'"),
        ({"input": [IMAGE]}, "input", "item 0: part 0: url must be data:image/TYPE"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}, "input", "'file_id'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "part 0 needs an image_url"),
        ({"input": [IMAGE | {"role": "assistant", "content": [PNG]}]}, "input", "no message of the assistant has"),
        ({"input": [{"role": "user", "content": [PNG | {"detail": "x"}]}]}, "input", "part 0: detail must be"),
        ({"input": [{"role": "user", "content": [PNG]}]}, "model", "can't do image"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "item 0 needs a role"),
        ({"input": [{"role": "user"}]}, "input", "item 0 needs a content"),
        ({"input": [{"role": "user", "content": "x", "y": 1}]}, "input", "item 0 has the unknown field 'y'"),
        ({"input": [{"role": "user", "content": "x", "": 1}]}, "input", "item 0 has the unknown field ''"),
        ({"input": [{"role": "user", "content": "x"}] * 4097}, "input", "has 4097 items; at most 4096"),
        ({"input": "\ud800"}, "input", "is not valid UTF-8"),
        ({"background": True}, "background", "must be"),
        ({"conversation": "conv_1"}, "conversation", "is not served here"),
        ({"prompt": {"id": "x"}}, "prompt", "is not served here"),
        ({"truncation": "auto"}, "truncation", "must be"),
        ({"include": ["x"]}, "include[0]", "must be"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"metadata": {"a": 1}}, "metadata", "must be an object"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "has 17 pairs"),
        ({"metadata": {"a" * 65: ""}}, "metadata", "may have keys of 64"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "need each other"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "needs stream"),
        ({"max_tokens": 5}, "max_tokens", "is unknown"),
        ({"inputs": 5}, "inputs", "is unknown (did you mean input?)"),
    ],
)
async def test_a_field_that_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str, says: str) -> None:
    await HttpRig().refused(RESPONSES, HELLO | fields, param, says)


# --- what is stored ---


async def test_a_conversation_continues_from_a_stored_response() -> None:
    rig = HttpRig()
    first = (await answered(rig, {"instructions": "be brief"}, "one")).json
    exchange = rig.post(RESPONSES, HELLO | {"input": "more", "previous_response_id": first["id"]})
    call = await rig.next_call()
    assert text_of(call.request.prompt) == "user: hi\nassistant: one\nuser: more\nassistant:", (
        "instructions are not kept"
    )
    call.tell(chunk(0, "two"), finished("stop"))
    second = (await exchange.end()).json
    assert second["previous_response_id"] == first["id"]
    deleted = await rig.request("DELETE", f"{RESPONSES}/{first['id']}", b"", {}).end()
    assert deleted.json == {"id": first["id"], "object": "response", "deleted": True}
    third = await rig.asked(RESPONSES, HELLO | {"input": "and", "previous_response_id": second["id"]})
    assert text_of(third.prompt) == "user: hi\nassistant: one\nuser: more\nassistant: two\nuser: and\nassistant:"


async def test_a_stored_response_can_be_read_and_deleted() -> None:
    rig = HttpRig()
    made = (await answered(rig, {"metadata": {"a": "\ud800"}})).json
    url = f"{RESPONSES}/{made['id']}"
    assert (await rig.get(url).end()).json == made
    assert (await rig.request("DELETE", url, b"", {}).end()).status == 200
    for method in ("GET", "DELETE"):
        gone = await rig.request(method, url, b"", {}).end()
        assert (gone.status, gone.error["code"]) == (404, "not_found")
    again = await rig.post(RESPONSES, HELLO | {"previous_response_id": made["id"]}).end()
    assert (again.status, again.error["code"]) == (404, "previous_response_not_found")
    assert again.error["param"] == "previous_response_id"


async def test_the_input_of_a_stored_response_is_listed_in_pages() -> None:
    rig = HttpRig()
    items = [{"role": "user", "content": str(place)} for place in range(5)]
    url = f"{RESPONSES}/{(await answered(rig, {'input': items})).json['id']}/input_items"

    async def page(query: str) -> Any:
        return (await rig.get(url, query).end()).json

    def texts(found: Any) -> str:
        return "".join(item["content"][0]["text"] for item in found["data"])

    whole = await page("")
    assert (texts(whole), whole["has_more"], whole["first_id"]) == ("43210", False, whole["data"][0]["id"])
    first = await page("limit=2&order=asc")
    assert (texts(first), first["has_more"]) == ("01", True)
    rest = await page(f"limit=3&order=asc&after={first['last_id']}")
    assert (texts(rest), rest["has_more"]) == ("234", False)
    last = await page(f"after={whole['last_id']}")
    assert (last["data"], last["has_more"], last["last_id"]) == ([], False, "")


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=x", "after"),
        ("/input_items?before=x", "before"),
        ("/input_items?after[]=x", "after[]"),
        ("/input_items?limit[]=1", "limit[]"),
        ("?stream=true", "stream"),
        ("?starting_after=3", "starting_after"),
    ],
)
async def test_a_wrong_parameter_of_the_url_is_named(path: str, param: str) -> None:
    rig = HttpRig()
    made = (await answered(rig, {})).json["id"]
    path, _, query = path.partition("?")
    refused = await rig.get(f"{RESPONSES}/{made}{path}", query).end()
    assert (refused.status, refused.error["param"]) == (400, param)


async def test_a_response_can_not_be_cancelled_after_its_end() -> None:
    rig = HttpRig()
    made = (await answered(rig, {})).json["id"]
    refused = await rig.request("POST", f"{RESPONSES}/{made}/cancel", b"", {}).end()
    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
    assert (await rig.request("POST", f"{RESPONSES}/resp_x/cancel", b"", {}).end()).status == 404


async def test_nothing_is_stored_unless_the_client_lets_it() -> None:
    rig = HttpRig()
    made = (await answered(rig, {"store": False})).json
    assert made["store"] is False
    assert (await rig.get(f"{RESPONSES}/{made['id']}").end()).status == 404


async def test_a_router_without_a_store_refuses_to_store() -> None:
    rig = HttpRig(bounds=replace(BOUNDS, stored_responses=0))
    assert (await answered(rig, {})).json["store"] is False
    await rig.refused(RESPONSES, HELLO | {"store": True}, "store")


async def test_a_tenants_responses_are_not_there_for_others(tmp_path: Path) -> None:
    checks_keys, keys = authenticator(tmp_path, "acme", "evil")
    acme, evil = ({"authorization": f"Bearer {key}"} for key in keys)
    rig = HttpRig(authenticator=checks_keys)
    exchange = await rig.answered(RESPONSES, HELLO, chunk(0, "cd"), finished("stop"), headers=acme)
    url = f"{RESPONSES}/{exchange.json['id']}"
    for method, path in (("GET", url), ("DELETE", url), ("GET", f"{url}/input_items"), ("POST", f"{url}/cancel")):
        assert (await rig.request(method, path, b"", evil).end()).status == 404
    continued = {"previous_response_id": url.rpartition("/")[2]}
    refused = await rig.post(RESPONSES, HELLO | continued, evil).end()
    assert refused.error["code"] == "previous_response_not_found"
    assert (await rig.request("GET", url, b"", {}).end()).status == 401
    assert (await rig.request("GET", url, b"", acme).end()).status == 200


async def test_a_conversation_of_too_many_items_is_refused() -> None:
    rig = HttpRig()
    items = [{"role": "user", "content": ""}] * 4096
    made = (await answered(rig, {"input": items})).json["id"]
    await rig.refused(RESPONSES, HELLO | {"previous_response_id": made}, "input", "4098 items")

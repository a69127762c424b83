"""Anthropic's API over a scripted request handler: bodies, answers, events and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import (
    AttemptsExhausted,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    EngineFault,
    InvalidRequest,
    PermissionDenied,
    QuotaExceeded,
    SlowReader,
    Unauthenticated,
    UnknownModel,
)
from baton.messages.generation import Chunk, Finished
from tests.support.http_client import Exchange
from tests.support.http_rig import CARD, MESSAGES, STREAM, HttpRig, authenticator, chunk, finished, text_of
from tests.support.router_parts import MODEL

COUNT = "/v1/messages/count_tokens"
HELLO: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def end(reason: str, stop_reason: int | str | None = None) -> Finished:
    ended = finished(reason)
    return Finished(reason, stop_reason, *(getattr(ended, name) for name in list(Finished.__slots__)[2:]))


def error_of(exchange: Exchange) -> dict[str, str]:
    """Anthropic's error object, which must be the whole body and name the request."""
    found = exchange.json
    assert set(found) == {"type", "error", "request_id"}
    assert found["type"] == "error"
    assert found["request_id"] == exchange.headers["request-id"] == exchange.headers["x-request-id"]
    assert set(found["error"]) - {"details"} == {"type", "message"}
    error: dict[str, str] = found["error"]
    return error


async def test_a_message_is_returned_whole() -> None:
    headers = {"anthropic-version": "2026-10-21", "x-request-id": "mine"}
    exchange = await HttpRig().answered(MESSAGES, HELLO, chunk(0, "cd"), chunk(2, "e"), end("stop"), headers=headers)
    assert exchange.status == 200
    assert exchange.headers["request-id"] == "mine"
    assert exchange.json == {
        "id": "msg_mine",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "cde"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 2,
        },
    }


async def test_every_field_reaches_the_core() -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 4, "priority": -2, "cache_salt": "s"}
    without_effect = {
        "metadata": {"user_id": "me"},
        "thinking": {"type": "disabled"},
        "tools": [],
        "tool_choice": {"type": "none"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
    }
    schema = {"type": "object", "properties": {}}
    wanted = {"stop_sequences": ["x"], "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    request = await HttpRig().asked(MESSAGES, HELLO | sampling | without_effect | wanted)
    assert {name: getattr(request, name) for name in sampling} == sampling
    assert (request.max_tokens, request.stop, request.model) == (5, ("x",), MODEL)
    assert json.loads(request.json_schema or "") == schema


async def test_text_blocks_and_the_system_prompt_become_one_conversation() -> None:
    blocks = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b"},
    ]
    turns = [
        {"role": "user", "content": blocks},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]
    body = HELLO | {"messages": turns, "system": [{"type": "text", "text": "s"}]}
    assert (
        text_of((await HttpRig().asked(MESSAGES, body)).prompt)
        == "system: s\nuser: a\nb\nc\nassistant: d\nuser: e\nassistant:"
    )


async def test_an_answer_continues_the_last_message_of_the_assistant() -> None:
    turns = [*HELLO["messages"], {"role": "assistant", "content": "It is"}]
    assert (
        text_of((await HttpRig().asked(MESSAGES, HELLO | {"messages": turns})).prompt) == "user: hi\nassistant: It is"
    )


@pytest.mark.parametrize("begun", ["", "It is "])
async def test_an_answer_can_not_continue_nothing_or_a_space(begun: str) -> None:
    turns = [*HELLO["messages"], {"role": "assistant", "content": begun}]
    exchange = await HttpRig().post(MESSAGES, HELLO | {"messages": turns}).end()
    assert exchange.status == 400
    assert error_of(exchange)["message"].startswith("messages[1].content: must not be empty or end with whitespace")


async def test_more_tokens_than_the_model_takes_end_as_its_context_window() -> None:
    rig = HttpRig()
    exchange = rig.post(MESSAGES, HELLO | {"max_tokens": 100_000})
    call = await rig.next_call()
    assert call.request.prompt is not None
    assert call.request.max_tokens == CARD.max_model_len - len(call.request.prompt)
    call.tell(chunk(0, "cd"), end("length"))
    assert (await exchange.end()).json["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize(
    ("ended", "stop_reason", "stop_sequence"),
    [(end("stop"), "end_turn", None), (end("length"), "max_tokens", None), (end("stop", "ab"), "stop_sequence", "ab")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_each_end_has_its_stop_reason(
    ended: Finished, stop_reason: str, stop_sequence: str | None, stream: bool
) -> None:
    rig = HttpRig()
    exchange = await rig.answered(MESSAGES, HELLO | {"stream": stream}, chunk(0, "cd"), ended)
    found = exchange.events[-2].json["delta"] if stream else exchange.json
    assert (found["stop_reason"], found["stop_sequence"]) == (stop_reason, stop_sequence)


async def test_a_message_is_streamed_as_events() -> None:
    rig = HttpRig()
    exchange = rig.post(MESSAGES, HELLO | STREAM, {"x-request-id": "mine"})
    # The second chunk's token completes no character.
    (await rig.next_call()).tell(chunk(0, "c"), Chunk(1, (1,), ""), chunk(2, "é"), finished())
    events = (await exchange.end()).events
    assert exchange.headers["content-type"].startswith("text/event-stream")
    assert exchange.headers["request-id"] == "mine"
    assert all(event.name == event.json["type"] for event in events)
    assert [event.name for event in events] == [
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    message = events[0].json["message"]
    assert (message["id"], message["content"], message["stop_reason"]) == ("msg_mine", [], None)
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (3, 0)
    assert [event.json["delta"]["text"] for event in events[3:5]] == ["c", "é"]
    assert events[6].json["usage"]["output_tokens"] == 2
    assert events[6].json["usage"]["cache_read_input_tokens"] == 1


async def test_pings_are_sent_while_there_are_no_events() -> None:
    rig = HttpRig(keep_alive_s=0.01)
    exchange = rig.post(MESSAGES, HELLO | STREAM)
    call = await rig.next_call()
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    await exchange.wait_for_body(ping + ping)
    call.tell(chunk(0, "c"), Draining("bye"))
    *_, last = (await exchange.end()).events
    assert last.name == "error"
    assert last.json["error"] == {"type": "overloaded_error", "message": "bye"}
    assert last.json["request_id"] == exchange.headers["request-id"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("prompt", "is bad"), 400, "invalid_request_error"),
        (Unauthenticated("who?"), 401, "authentication_error"),
        (PermissionDenied("no"), 403, "permission_error"),
        (UnknownModel("model", "is unknown"), 404, "not_found_error"),
        (DuplicateRequest("again"), 409, "conflict_error"),
        (QuotaExceeded("too many", 0.5), 429, "rate_limit_error"),
        (EngineFault("NaN"), 500, "api_error"),
        (AttemptsExhausted("gone"), 500, "api_error"),
        (DeadlineExceeded("late"), 504, "timeout_error"),
        (Draining("bye"), 529, "overloaded_error"),
        (SlowReader("too slow"), 408, "timeout_error"),
        (Cancelled("by another call"), 499, "api_error"),
    ],
)
async def test_each_error_has_anthropics_type_and_status(error: BatonError, status: int, kind: str) -> None:
    rig = HttpRig()
    exchange = await rig.answered(MESSAGES, HELLO, error)
    assert (exchange.status, error_of(exchange)["type"]) == (status, kind)
    assert ("retry-after" in exchange.headers) == isinstance(error, QuotaExceeded | Draining | AttemptsExhausted)
    if status == 400:
        assert error_of(exchange)["message"].startswith("messages: ")


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", MESSAGES, 405, "invalid_request_error"),
        ("POST", f"{MESSAGES}/batches", 404, "not_found_error"),
        ("GET", f"{MESSAGES}/x", 404, "not_found_error"),
        ("POST", f"{MESSAGES}x", 404, None),
    ],
)
async def test_every_path_below_messages_has_anthropics_errors(
    method: str, path: str, status: int, kind: str | None
) -> None:
    exchange = await HttpRig().request(method, path, b"", {}).end()
    assert exchange.status == status
    if kind is None:
        assert exchange.error["code"] == "unknown_url"
    else:
        assert error_of(exchange)["type"] == kind


async def test_a_body_that_is_too_long_has_anthropics_error() -> None:
    exchange = await HttpRig().post(MESSAGES, b" " * (1 << 21)).end()
    assert (exchange.status, error_of(exchange)["type"]) == (413, "request_too_large")


def user(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, block]}]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content: must be a string or a list"),
        ({"messages": [{"role": "user", "content": "x" * 100}]}, "messages: has 117 tokens"),
        (user({"type": "image", "source": {}}), "messages[0].content: block 1: source.type: is required"),
        (user({"type": "document", "source": {}}), "messages[0].content: block 1 is of the type 'document'"),
        (user({"type": "document"}), "messages[0].content: block 1 is of the type 'document'"),
        (user({"type": "tool_result"}), "messages[0].content: block 1: tool_use_id: is required"),
        (user({"type": "text"}), "messages[0].content: block 1: text: is required"),
        (user({"type": "text", "text": "x", "y": 1}), "messages[0].content: block 1: y: is unknown"),
        (
            user({"type": "text", "text": "x", "colour": [{}]}),
            "messages[0].content: block 1: colour: is unknown",
        ),
        ({"system": [{"type": "image"}]}, "system: block 0"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"max_tokens": None}, "max_tokens: "),
        ({"model": None}, "model: "),
        ({"temperature": 1.5}, "temperature: "),
        ({"temperature": -0.5}, "temperature: "),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: "),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: can't be enabled"),
        ({"tools": [{"name": "x", "input_schema": {}}]}, "tools: are not served for this model"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": [{}]}, "mcp_servers: is not served here"),
        ({"thread": {"type": "create"}}, "thread: is not served here"),
        ({"container": "x"}, "container: is not served here"),
        ({"output_config": {"effort": "most"}}, "output_config.effort: must be"),
        ({"speed": "fast"}, "speed: "),
        ({"metadata": 1}, "metadata: must be"),
        ({"metadata": {"user_id": 1}}, "metadata.user_id: must be"),
        ({"metadata": {"a": "b"}}, "metadata.a: is unknown"),
        ({"prompt": "x"}, "prompt: is unknown"),
        ({"stop": ["x"]}, "stop: is unknown"),
        ({"max_tokenz": 1}, "max_tokenz: is unknown (did you mean max_tokens?)"),
    ],
)
async def test_a_field_that_is_not_served_is_refused_by_name(fields: dict[str, Any], says: str) -> None:
    body = {name: value for name, value in (HELLO | fields).items() if value is not None}
    rig = HttpRig()
    exchange = rig.post(MESSAGES, body)
    if "has 117 tokens" in says:
        (await rig.next_call()).tell(InvalidRequest("prompt", "has 117 tokens"))
    await exchange.end()
    assert (exchange.status, error_of(exchange)["type"]) == (400, "invalid_request_error")
    assert error_of(exchange)["message"].startswith(says)


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_another_version_of_the_api_is_refused(path: str) -> None:
    exchange = await HttpRig().post(path, HELLO, {"anthropic-version": "2030-01-01"}).end()
    assert exchange.status == 400
    assert error_of(exchange)["message"].startswith("anthropic-version: must be 2023-06-01 or 2026-10-21")


async def test_a_stream_can_not_be_resumed() -> None:
    exchange = await HttpRig().post(MESSAGES, HELLO | STREAM, {"last-event-id": "1"}).end()
    assert error_of(exchange)["message"].startswith("last-event-id: ")


async def test_tokens_are_counted_without_asking_the_core() -> None:
    rig = HttpRig()
    body = {name: HELLO[name] for name in ("model", "messages")}
    exchange = await rig.post(COUNT, body | {"system": "s"}).end()
    assert exchange.json == {"input_tokens": len("system: s\nuser: hi\nassistant:")}
    assert rig.handler.calls.empty()
    refused = await rig.post(COUNT, body | {"max_tokens": 5}).end()
    assert error_of(refused)["message"].startswith("max_tokens: is unknown")
    missing = await rig.post(COUNT, body | {"model": "another"}).end()
    assert (missing.status, error_of(missing)["type"]) == (404, "not_found_error")


async def test_a_large_conversation_is_counted_in_a_thread() -> None:
    rig = HttpRig()
    turns = [{"role": "user", "content": "x" * 20_000}]
    exchange = await rig.post(COUNT, {"model": MODEL, "messages": turns}).end()
    assert exchange.json["input_tokens"] > 20_000
    assert rig.handler.num_in_threads == 2, "parsed, and counted"


@pytest.mark.parametrize(
    ("header", "shown"), [("x-api-key", "{}"), ("authorization", "Bearer {}"), ("authorization", "bearer  {}")]
)
async def test_a_key_is_taken_from_both_headers(tmp_path: Path, header: str, shown: str) -> None:
    """Clients before version 2 of Anthropic's package send x-api-key."""
    checks_keys, (key,) = authenticator(tmp_path, "acme")
    rig = HttpRig(authenticator=checks_keys)
    body = {name: HELLO[name] for name in ("model", "messages")}
    assert (await rig.post(COUNT, body, {header: shown.format(key)}).end()).status == 200
    refused = await rig.post(COUNT, body, {header: shown.format("wrong")}).end()
    assert (refused.status, error_of(refused)["type"]) == (401, "authentication_error")
    both = {"authorization": "Bearer wrong", "x-api-key": key}
    assert (await rig.post(COUNT, body, both).end()).status == 401

"""The OpenAI endpoints over a scripted request handler: requests, answers and errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from starlette.routing import Route

from baton.errors import Draining, EngineFault, InvalidRequest, RequestNotFound, VersionGone
from baton.messages.generation import Chunk, PromptLogprobs, SequenceFinished
from baton.messages.sampling import TokenLogprobs
from router.http.app import HttpFront
from tests.support.http_rig import CHATS, COMPLETIONS, HELLO, STREAM, HttpRig, chunk, finished, text_of
from tests.support.router_parts import MODEL

PROMPT: dict[str, object] = {"prompt": "ab"}
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}
"""The usage of the completion that `finished` ends."""


async def test_a_completion_is_returned_whole() -> None:
    rig = HttpRig()
    exchange = rig.post(COMPLETIONS, PROMPT | {"max_tokens": 3, "stop": "x", "logit_bias": {"97": 1}, "top_k": 5})
    call = await rig.next_call()
    request = call.request
    assert (request.prompt, request.max_tokens, request.stop, request.top_k) == ("ab", 3, ("x",), 5)
    assert request.logit_bias == {97: 1.0}
    call.tell(chunk(0, "c"), chunk(1, "d"), Chunk(2, (), "e"), finished())
    await exchange.end()
    assert (exchange.status, exchange.headers["x-request-id"]) == (200, request.request_id)
    assert (exchange.headers["baton-seed"], exchange.headers["baton-prefill-node"]) == ("1", "p1")
    # Literal like that of a chat below: a command writes the answers in tests/outside anew.
    assert exchange.json == {
        "id": f"cmpl-{request.request_id}",
        "object": "text_completion",
        "created": 5,
        "model": MODEL,
        "system_fingerprint": "fp_0123456789ab",
        "choices": [
            {"index": 0, "text": "cde", "logprobs": None, "finish_reason": "length", "stop_reason": None},
        ],
        "usage": USAGE,
    }


async def test_a_chat_uses_the_template_and_may_fill_the_models_length() -> None:
    request = await HttpRig().asked(CHATS, HELLO)
    assert text_of(request.prompt) == "user: hi\nassistant:"
    assert request.max_tokens == 64 - len("user: hi\nassistant:")
    answer = await HttpRig().answered(CHATS, HELLO, chunk(0, "yo"), finished("stop"))
    message = {"role": "assistant", "content": "yo", "refusal": None}
    assert answer.json == {
        "id": f"chatcmpl-{answer.headers['x-request-id']}",
        "object": "chat.completion",
        "created": 5,
        "model": MODEL,
        "system_fingerprint": "fp_0123456789ab",
        "choices": [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None},
        ],
        "usage": USAGE,
    }


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_max_tokens_limit_a_chat(name: str) -> None:
    assert (await HttpRig().asked(CHATS, HELLO | {name: 7})).max_tokens == 7


async def test_a_completion_is_streamed_as_events() -> None:
    exchange = await HttpRig().answered(COMPLETIONS, PROMPT | STREAM, chunk(0, "c"), chunk(1, 'd"\n'), finished())
    assert exchange.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = exchange.events
    assert done.is_done
    assert [event.id for event in events] == ["1", "4", "4"]
    assert [event.text for event in events] == ["c", 'd"\n', ""]
    assert [event.choice["finish_reason"] for event in events] == [None, None, "length"]
    assert {event.json["object"] for event in events} == {"text_completion"}


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_usage() -> None:
    body = HELLO | STREAM | {"stream_options": {"include_usage": True}}
    opening, text, end, usage, done = (await HttpRig().answered(CHATS, body, chunk(0, "é"), finished("stop"))).events
    assert opening.choice["delta"] == {"role": "assistant", "content": ""}
    assert (text.choice["delta"], end.choice["delta"]) == ({"content": "é"}, {})
    assert (usage.json["choices"], usage.json["usage"]["total_tokens"]) == ([], 5)
    assert [event.json["usage"] for event in (opening, text, end)] == [None] * 3
    assert done.is_done


async def test_every_event_has_the_usage_if_requested() -> None:
    body = PROMPT | STREAM | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *events, _ = (await HttpRig().answered(COMPLETIONS, body, chunk(0, "cd"), Chunk(2, (), "e"), finished())).events
    assert [event.json["usage"]["completion_tokens"] for event in events] == [2, 2, 2]


async def test_text_without_tokens_comes_with_the_end_and_has_its_own_position() -> None:
    said = chunk(0, "c"), Chunk(1, (), "rest"), replace(finished("stop"), stop_reason="END")
    first, end, _ = (await HttpRig().answered(COMPLETIONS, PROMPT | STREAM, *said)).events
    assert (first.id, first.text) == ("1", "c")
    assert (end.id, end.text) == ("2", "rest")
    assert (end.choice["finish_reason"], end.choice["stop_reason"]) == ("stop", "END")


async def test_event_ids_have_the_positions_of_all_sequences() -> None:
    said = chunk(0, "ab"), chunk(0, "x", 1), SequenceFinished(1, "stop", 7, 1), chunk(2, "c")
    ends = SequenceFinished(0, "length", None, 3), finished()
    *events, _ = (await HttpRig().answered(CHATS, HELLO | STREAM | {"n": 2}, *said, *ends)).events
    assert [event.id for event in events] == ["0.0", "0.0", "2.0", "2.1", "2.1", "3.1", "3.1"]
    assert [event.choice["index"] for event in events] == [0, 1, 0, 1, 1, 0, 0]
    assert [event.choice["finish_reason"] for event in events][4:] == ["stop", None, "length"]
    assert events[4].choice["stop_reason"] == 7


async def test_several_prompts_give_several_choices() -> None:
    rig = HttpRig()
    exchange = rig.post(COMPLETIONS, {"prompt": ["ab", [99, 100]], "n": 2}, {"x-request-id": "mine"})
    calls = await rig.next_calls(2)
    assert [(call.request_id, call.request.prompt) for call in calls] == [("mine-0", "ab"), ("mine-1", [99, 100])]
    for place, call in reversed(list(enumerate(calls))):
        call.tell(chunk(0, f"{place}0"), chunk(0, f"{place}1", 1))
        call.tell(SequenceFinished(0, "stop", None, 2), SequenceFinished(1, "length", None, 2), finished())
    choices = (await exchange.end()).json["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "00"), (1, "01"), (2, "10"), (3, "11")]
    assert exchange.json["usage"]["total_tokens"] == 10


async def test_one_bad_prompt_of_several_ends_them_all() -> None:
    rig = HttpRig()
    exchange = rig.post(COMPLETIONS, {"prompt": ["ab", "cd"]})
    first, second = await rig.next_calls(2)
    second.tell(InvalidRequest("prompt", "is bad"))
    assert (await exchange.end()).error["param"] == "prompt"
    assert first.is_closed.is_set()


async def test_completions_have_log_probabilities() -> None:
    body = PROMPT | {"logprobs": 1, "return_token_ids": True}
    assert (await HttpRig().asked(COMPLETIONS, body)).logprobs == 1
    positions = (TokenLogprobs(99, -0.5, 1, ((99, -0.5),)), TokenLogprobs(100, float("-inf"), 2, ((98, -0.25),)))
    answer = await HttpRig().answered(COMPLETIONS, body, Chunk(0, (99, 100), "cd", positions), finished())
    (choice,) = answer.json["choices"]
    assert choice["token_ids"] == [99, 100]
    assert choice["logprobs"] == {
        "tokens": ["c", "d"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"c": -0.5}, {"b": -0.25, "d": -9999.0}],
        "text_offset": [0, 1],
    }


def of_prompt(*token_ids: int) -> PromptLogprobs:
    return PromptLogprobs([TokenLogprobs(token_id, -0.5, 2, ((97, -0.25),)) for token_id in token_ids])


async def test_an_echoed_prompt_begins_text_and_log_probabilities() -> None:
    rig = HttpRig()
    # What lm-eval's local-completions sends.
    body = {"prompt": [[98, 99], [97]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    exchange = rig.post(COMPLETIONS, body)
    first, second = await rig.next_calls(2)
    for request in (first.request, second.request):
        assert (request.logprobs, request.prompt_logprobs, request.max_tokens) == (1, 1, 1)
    output = Chunk(0, (100,), "d", (TokenLogprobs(100, -1.0, 1, ((100, -1.0),)),))
    first.tell(of_prompt(99), output, finished(completion_tokens=1))
    second.tell(output, finished(completion_tokens=1))
    answer = (await exchange.end()).json
    assert [choice["text"] for choice in answer["choices"]] == ["bcd", "ad"]
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["b", "c", "d"],
        "token_logprobs": [None, -0.5, -1.0],
        "top_logprobs": [None, {"a": -0.25, "c": -0.5}, {"d": -1.0}],
        "text_offset": [0, 1, 2],
    }
    assert answer["choices"][1]["logprobs"]["token_logprobs"] == [None, -1.0]
    assert answer["usage"]["completion_tokens"] == 2


async def test_an_echoed_prompt_has_as_many_alternatives_as_the_output() -> None:
    """Also where more of them are wanted beside it."""
    body = {"prompt": "bc", "max_tokens": 0, "logprobs": 1, "prompt_logprobs": 3, "echo": True}
    told = PromptLogprobs((TokenLogprobs(99, -0.5, 2, ((97, -0.25), (99, -0.5), (100, -3.0))),))
    answer = await HttpRig().answered(COMPLETIONS, body, told, chunk(0, "d"), finished("stop", completion_tokens=1))
    (choice,) = answer.json["choices"]
    assert choice["logprobs"]["top_logprobs"] == [None, {"a": -0.25, "c": -0.5}]
    assert len(choice["prompt_logprobs"][1]) == 3


async def test_a_prompt_alone_can_be_echoed() -> None:
    body = {"prompt": "bc", "max_tokens": 0, "logprobs": 0, "echo": True}
    request = await HttpRig().asked(COMPLETIONS, body)
    assert (request.prompt, request.max_tokens, request.prompt_logprobs) == ([98, 99], 1, 0)
    end = finished("stop", completion_tokens=1)
    answer = (await HttpRig().answered(COMPLETIONS, body, of_prompt(99), chunk(0, "d"), end)).json
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("bc", "length", 0)
    assert choice["logprobs"]["tokens"] == ["b", "c"]


async def test_a_stream_begins_with_an_echoed_prompt() -> None:
    exchange = await HttpRig().answered(COMPLETIONS, PROMPT | STREAM | {"echo": True}, chunk(0, "c"), finished())
    assert "".join(event.text for event in exchange.events) == "abc"


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHATS, HELLO)])
async def test_log_probabilities_of_a_prompt_are_where_vllm_has_them(path: str, body: dict[str, object]) -> None:
    body = body | {"prompt_logprobs": 1, "n": 2}
    assert (await HttpRig().asked(path, body)).prompt_logprobs == 1
    ends = [SequenceFinished(index, "length", None, 1) for index in (0, 1)]
    said = of_prompt(98), chunk(0, "c"), chunk(0, "d", 1)
    answer = (await HttpRig().answered(path, body, *said, *ends, finished())).json
    entries = {
        "98": {"logprob": -0.5, "rank": 2, "decoded_token": "b"},
        "97": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
    }
    holder = answer["choices"][0] if path == COMPLETIONS else answer
    assert holder["prompt_logprobs"] == [None, entries]
    assert "prompt_logprobs" not in answer["choices"][1]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (STREAM | {"prompt_logprobs": 0}, "prompt_logprobs: does not go with stream"),
        ({"prompt": "\n" * 100_000, "echo": True, "n": 84}, "echo: would repeat 16800168 bytes of prompts"),
        (STREAM | {"prompt": "\n" * 100_000, "echo": True, "n": 84}, "echo: would repeat 16800168 bytes of prompts"),
        (STREAM | {"echo": True, "logprobs": 1}, "echo: does not go with logprobs in a stream"),
        (STREAM | {"echo": True, "max_tokens": 0}, "max_tokens: must be at least 1 in a stream"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens: must be 0 to max_tokens"),
        ({"prompt": [[1] * 100] * 32, "echo": True, "logprobs": 20, "n": 8}, "logprobs: of 25600 tokens"),
        ({"prompt": [[1] * 1000] * 32, "prompt_logprobs": 20}, "prompt_logprobs: of 32000 tokens"),
        ({"prompt": [1, -1], "echo": True}, "prompt: token 1 is -1"),
        ({"prompt": [[1], [10**400]], "echo": True}, "prompt: token 0 is 1000"),
    ],
)
async def test_what_does_not_go_with_a_prompts_log_probabilities(body: dict[str, object], said: str) -> None:
    await HttpRig().refused(COMPLETIONS, PROMPT | body, said.partition(":")[0], said)


async def test_a_streamed_chat_has_log_probabilities() -> None:
    body = HELLO | STREAM | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    assert (await HttpRig().asked(CHATS, body)).logprobs == 2
    told = Chunk(0, (233,), "é", (TokenLogprobs(233, -1.0, 1, ((98, -2.0),)),))
    _, text, _, _ = (await HttpRig().answered(CHATS, body, told, finished())).events
    assert text.choice["token_ids"] == [233]
    entry = {"token": "é", "logprob": -1.0, "bytes": [195, 169]}
    top = [{"token": "b", "logprob": -2.0, "bytes": [98]}]
    assert text.choice["logprobs"] == {"content": [entry | {"top_logprobs": top}]}


async def test_a_whole_answer_whose_version_is_gone_begins_anew_once() -> None:
    rig = HttpRig()
    exchange = rig.post(COMPLETIONS, PROMPT, {"x-request-timeout-ms": "9000"})
    first = await rig.next_call()
    first.tell(chunk(0, "x"))
    rig.clock.advance(2.0)
    first.tell(VersionGone("ask again"))
    second = await rig.next_call()
    assert second.request == replace(first.request, seed=1), "the seed that the router drew"
    assert second.timeout_s == 7.0
    second.tell(chunk(0, "cd"), finished())
    await exchange.end()
    assert (exchange.status, exchange.json["choices"][0]["text"]) == (200, "cd")
    again = rig.post(COMPLETIONS, PROMPT)
    for _ in range(2):
        (await rig.next_call()).tell(VersionGone("ask again"))
    await again.end()
    assert (again.status, again.error["code"]) == (503, "version_gone")


async def test_an_answer_during_a_change_of_version_has_no_fingerprint() -> None:
    rig = HttpRig()
    exchange = rig.post(COMPLETIONS, PROMPT)
    call = await rig.next_call()
    rig.card = replace(rig.card, fingerprint="fp_other")
    call.tell(chunk(0, "cd"), finished())
    assert (await exchange.end()).json["system_fingerprint"] is None


async def test_an_error_after_the_first_token_is_the_last_event() -> None:
    exchange = await HttpRig().answered(COMPLETIONS, PROMPT | STREAM, chunk(0, "c"), EngineFault("NaN"))
    first, last = exchange.events
    assert (exchange.status, first.text) == (200, "c")
    assert last.json["error"] == {"message": "NaN", "type": "server_error", "param": None, "code": "engine_fault"}
    assert last.id is None


async def test_a_stream_that_stops_without_an_end_is_an_error() -> None:
    first, last = (await HttpRig().answered(COMPLETIONS, PROMPT | STREAM, chunk(0, "c"), None)).events
    assert (first.text, last.json["error"]["message"]) == ("c", "the stream ended before its request did")


async def test_a_client_that_leaves_while_it_reads_nothing_ends_its_request() -> None:
    rig = HttpRig()
    exchange = rig.post(COMPLETIONS, PROMPT | STREAM)
    call = await rig.next_call()
    exchange.stop_reading()
    call.tell(chunk(0, "c"))
    exchange.disconnect()
    await call.is_closed.wait()
    await exchange.task


async def test_a_client_that_leaves_during_its_body_is_not_answered() -> None:
    exchange = HttpRig().request("POST", COMPLETIONS, b"", {"content-type": "application/json"}, is_whole=False)
    exchange.disconnect()
    await exchange.task
    assert exchange.status == 0


async def test_comments_are_sent_while_there_are_no_events() -> None:
    rig = HttpRig(keep_alive_s=0.01)
    exchange = rig.post(COMPLETIONS, PROMPT | STREAM)
    call = await rig.next_call()
    await exchange.wait_for_body(b": waiting\n\n: waiting\n\n")
    call.tell(chunk(0, "c"), Draining("bye"))
    first, last = (await exchange.end()).events
    # The status was out by then, so the error comes as an event.
    assert (first.text, last.json["error"]["type"]) == ("c", "overloaded_error")


def resumes_after(last_event_id: str) -> dict[str, str]:
    return {"x-request-id": "mine", "last-event-id": last_event_id}


async def test_a_resumed_stream_continues_after_the_last_event() -> None:
    rig = HttpRig()
    exchange = rig.post(CHATS, HELLO | STREAM | {"n": 2}, resumes_after("3.1"))
    call = await rig.next_call()
    assert (call.request_id, call.positions) == ("mine", (3, 1))
    call.tell(chunk(3, "d"), SequenceFinished(0, "stop", None, 4), SequenceFinished(1, "stop", None, 1), finished())
    *events, _ = (await exchange.end()).events
    # No opening: the client has it.
    assert [event.id for event in events] == ["4.1", "4.1", "4.1"]
    assert events[0].choice["delta"] == {"content": "d"}
    assert exchange.headers["x-request-id"] == "mine"


async def test_resuming_an_unknown_stream_is_not_found() -> None:
    unknown = RequestNotFound("no router knows it")
    exchange = await HttpRig().answered(COMPLETIONS, PROMPT | STREAM, unknown, headers=resumes_after("3"))
    assert (exchange.status, exchange.error["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("last_event_id", "more", "param"),
    [
        ("x", {}, "last-event-id"),
        ("1.2", {}, "last-event-id"),
        ("", {}, "last-event-id"),
        ("1", {"n": 2}, "last-event-id"),
        ("1", {"prompt": ["a", "b"]}, "last-event-id"),
        ("-1", {}, "last-event-id"),
        ("1" * 10, {}, "last-event-id"),
        ("1", {"stream": False}, "stream"),
    ],
)
async def test_an_invalid_resume_is_refused(last_event_id: str, more: dict[str, object], param: str) -> None:
    await HttpRig().refused(COMPLETIONS, PROMPT | STREAM | more, param, headers=resumes_after(last_event_id))


async def test_resuming_needs_the_request_id() -> None:
    await HttpRig().refused(COMPLETIONS, PROMPT | STREAM, "x-request-id", headers={"last-event-id": "1"})


@pytest.mark.parametrize("request_id", ["a b", "x" * 65, "é", ""])
async def test_an_invalid_request_id_is_refused(request_id: str) -> None:
    refused = await HttpRig().refused(COMPLETIONS, PROMPT, "x-request-id", headers={"x-request-id": request_id})
    assert refused.headers["x-request-id"] not in ("", request_id)


async def test_a_deadline_is_taken_from_its_header() -> None:
    rig = HttpRig()
    rig.post(COMPLETIONS, PROMPT, {"x-request-timeout-ms": "1500"})
    assert (await rig.next_call()).timeout_s == 1.5


@pytest.mark.parametrize("said", ["0", "-1", "1e3", "x", "9" * 30])
async def test_an_invalid_deadline_is_refused(said: str) -> None:
    header = "x-request-timeout-ms"
    await HttpRig().refused(COMPLETIONS, PROMPT, header, headers={header: said})


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "//", 404, "unknown_url"),
        ("POST", "/v1/completions/", 404, "unknown_url"),
        ("GET", "/v1/\N{SNOWMAN}", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("GET", "/tokenize", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/another", 404, "model_not_found"),
        ("GET", "/v1/embeddings", 405, "method_not_allowed"),
    ],
)
async def test_unknown_paths_and_methods_are_refused(method: str, path: str, status: int, code: str) -> None:
    exchange = await HttpRig().request(method, path, b"", {}).end()
    assert (exchange.status, exchange.error["code"]) == (status, code)
    assert ("allow" in exchange.headers) == (status == 405)


async def test_models_metrics_and_health_are_served() -> None:
    rig = HttpRig()
    models = (await rig.get("/v1/models").end()).json
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [(MODEL, 64)]
    assert (await rig.get(f"/v1/models/{MODEL}").end()).json == models["data"][0]
    assert (await rig.get("/metrics").end()).body == b"figures\n"
    for page in ("/livez", "/readyz", "/health"):
        assert (await rig.get(page).end()).status == 200
    rig.why_not_ready = "no node can serve"
    ready = await rig.get("/readyz").end()
    assert (ready.status, ready.body) == (503, b"no node can serve\n")
    assert (await rig.get("/livez").end()).status == 200


@pytest.mark.parametrize("told", [(), (chunk(0, "c"),)])
async def test_an_internal_error_reveals_nothing_and_is_logged(
    told: tuple[Chunk, ...], caplog: pytest.LogCaptureFixture
) -> None:
    exchange = await HttpRig().answered(COMPLETIONS, PROMPT | STREAM, *told, ZeroDivisionError("secret"))
    assert exchange.status == (200 if told else 500)
    error = exchange.events[-1].json["error"] if told else exchange.error
    assert (error["type"], error["message"]) == ("server_error", "internal error; the log of the server has it")
    assert "secret" in caplog.text


# Every path names in `Allow` all of the methods that it has when it is asked with another one (RFC 9110, 15.5.6).
ALLOWED = {
    "/v1/responses/resp_1": "DELETE, GET, HEAD",
    "/v1/responses/resp_1/cancel": "POST",
    "/v1/responses/resp_1/input_items": "GET, HEAD",
    "/v1/responses": "POST",
    "/v1/chat/completions": "POST",
    "/v1/messages": "POST",
    "/v1/models/x": "GET, HEAD",
    "/tokenize": "POST",
    "/metrics": "GET, HEAD",
    "/": "GET, HEAD",
}


@pytest.mark.parametrize(("path", "allowed"), ALLOWED.items())
async def test_a_wrong_method_is_refused_with_those_that_are_right(path: str, allowed: str) -> None:
    exchange = await HttpRig().request("PUT", path, b"", {}).end()
    assert exchange.status == 405
    assert exchange.headers["allow"] == allowed


async def test_no_path_that_is_served_lacks_a_method_in_allow() -> None:
    rig = HttpRig()
    front = rig._app
    assert isinstance(front, HttpFront)
    methods: dict[str, set[str]] = {}
    for route in front._routes.routes:
        assert isinstance(route, Route)
        methods.setdefault(route.path.replace("{id}", "x").replace("{name:path}", "x"), set()).update(
            route.methods or ()
        )
    # A stored response might have this name.
    methods["/v1/responses/input_tokens"] |= methods["/v1/responses/x"]
    for path, named in methods.items():
        exchange = await rig.request("PATCH", path, b"", {}).end()
        assert (exchange.status, set(exchange.headers["allow"].split(", "))) == (405, named), path

"""What holds for all APIs of the HTTP front: statuses of errors, names of fields, and clients that leave."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import DeadlineExceeded, Draining, EngineFault, InvalidRequest, QueueFull, QuotaExceeded
from baton.messages.generation import GenerateEvent, ModelCard
from tests.support.http_rig import (
    CARD,
    CHATS,
    COMPLETIONS,
    CROSS,
    EMBEDDINGS,
    HELLO,
    MESSAGES,
    RESPONSES,
    STREAM,
    HttpRig,
    chunk,
    vector,
)
from tests.support.router_parts import MODEL

RERANK = "/rerank"
COMPLETION: dict[str, Any] = {"prompt": "ab"}
TWO_COMPLETIONS: dict[str, Any] = {"prompt": ["a", "b"]}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "hi"}
MESSAGE: dict[str, Any] = {"model": MODEL, "max_tokens": 5, **HELLO}
RANKED: dict[str, Any] = {"query": "q", "documents": ["a", "b"]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, COMPLETION), (RESPONSES, RESPONSE)])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "headers"),
    [
        (InvalidRequest("prompt", "is bad"), 400, "invalid_request_error", None, {}),
        (DeadlineExceeded("late"), 504, "timeout_error", "deadline_exceeded", {"x-should-retry": "false"}),
        (EngineFault("NaN"), 500, "server_error", "engine_fault", {"x-should-retry": "false"}),
        (
            QuotaExceeded("2 run", 0.5),
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
            {"retry-after": "1", "x-should-retry": "true"},
        ),
        (
            QueueFull("no room", 2.5),
            503,
            "overloaded_error",
            "overloaded",
            {"retry-after": "3", "retry-after-ms": "2500", "x-should-retry": "true"},
        ),
        (Draining("bye"), 503, "overloaded_error", "overloaded", {"retry-after": "1", "x-should-retry": "true"}),
    ],
)
async def test_an_error_before_the_first_token_is_an_http_status(
    path: str,
    body: dict[str, Any],
    stream: bool,
    error: Exception,
    status: int,
    kind: str,
    code: str | None,
    headers: dict[str, str],
) -> None:
    exchange = await HttpRig().answered(path, body | {"stream": stream}, error, headers={"x-request-id": "mine"})
    assert (exchange.status, exchange.error["type"], exchange.error["code"]) == (status, kind, code)
    assert headers.items() <= exchange.headers.items()
    assert exchange.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("path", "body", "field", "name"),
    [
        (CHATS, HELLO | {"max_tokens": 7}, "max_tokens", "max_tokens"),
        (CHATS, HELLO | {"max_completion_tokens": 7}, "max_tokens", "max_completion_tokens"),
        (RESPONSES, RESPONSE, "prompt", "input"),
        (RESPONSES, RESPONSE, "max_tokens", "max_output_tokens"),
        (EMBEDDINGS, {"input": "a"}, "prompt", "input"),
        (EMBEDDINGS, {"input": "a"}, "priority", "priority"),
    ],
)
async def test_a_field_that_the_core_refuses_is_named_as_the_client_named_it(
    path: str, body: dict[str, Any], field: str, name: str
) -> None:
    assert (await HttpRig().answered(path, body, InvalidRequest(field, "is bad"))).error["param"] == name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBEDDINGS, {"input": "a", "model": "x"}),
        ("/tokenize", {"prompt": "a", "model": "x"}),
        ("/detokenize", {"tokens": [1], "model": "x"}),
    ],
)
async def test_another_model_is_not_found(path: str, body: dict[str, Any]) -> None:
    exchange = await HttpRig().post(path, body).end()
    assert (exchange.status, exchange.error["code"]) == (404, "model_not_found")


FIRST = (chunk(0, "c"),)


@pytest.mark.parametrize(
    ("card", "path", "body", "num_calls", "told", "num_events"),
    [
        (CARD, COMPLETIONS, COMPLETION, 1, FIRST, 0),
        (CARD, COMPLETIONS, COMPLETION | STREAM, 1, FIRST, 1),
        (CARD, COMPLETIONS, TWO_COMPLETIONS, 2, FIRST, 0),
        (CARD, COMPLETIONS, TWO_COMPLETIONS | STREAM, 2, FIRST, 1),
        (CARD, RESPONSES, RESPONSE, 1, FIRST, 0),
        (CARD, RESPONSES, RESPONSE | STREAM, 1, FIRST, 5),
        (CARD, MESSAGES, MESSAGE, 1, FIRST, 0),
        (CARD, MESSAGES, MESSAGE | STREAM, 1, FIRST, 4),
        (CARD, EMBEDDINGS, {"input": ["a", "b"]}, 2, (), 0),
        (CARD, RERANK, RANKED, 3, (), 0),
        (CROSS, RERANK, RANKED, 2, (), 0),
    ],
)
async def test_a_client_that_leaves_ends_its_requests(
    card: ModelCard,
    path: str,
    body: dict[str, Any],
    num_calls: int,
    told: tuple[GenerateEvent, ...],
    num_events: int,
) -> None:
    """`told`: what the core answers to the first request; `num_events`: how many events of a stream come of it."""
    rig = HttpRig(card=card)
    exchange = rig.post(path, body)
    calls = await rig.next_calls(num_calls)
    calls[0].tell(*told)
    await exchange.wait_for_events(num_events)
    exchange.disconnect()
    for call in calls:
        await call.is_closed.wait()
    await exchange.task
    assert not exchange.is_complete
    assert rig.store.stats().num_responses == 0


@pytest.mark.parametrize(
    ("card", "path", "body", "param"),
    [
        (CARD, EMBEDDINGS, {"input": ["a", "b", "c"]}, "input[1]"),
        # /rerank embeds the query first, then the documents; a cross-encoder gets pairs of the query and a document.
        (CARD, RERANK, RANKED, "documents[0]"),
        (CROSS, RERANK, RANKED | {"documents": ["a", "b", "c"]}, "documents[1]"),
    ],
)
@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidRequest("prompt", "is bad"), 400), (QuotaExceeded("2 run"), 429), (EngineFault("broken"), 500)],
)
async def test_a_failed_input_fails_the_call_and_ends_the_others(
    card: ModelCard, path: str, body: dict[str, Any], param: str, error: Exception, status: int
) -> None:
    """Three requests are sent at once, and the second fails. Only a bad request is the fault of an input."""
    rig = HttpRig(card=card)
    exchange = rig.post(path, body)
    first, second, third = await rig.next_calls(3)
    first.tell(vector(1, 0))
    second.tell(error)
    await exchange.end()
    assert (exchange.status, exchange.error["param"]) == (status, param if status == 400 else None)
    await third.is_closed.wait()

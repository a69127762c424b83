"""What holds for all APIs of the HTTP front: statuses of errors, names of fields, and clients that leave."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import DeadlineExceeded, Draining, EngineFault, InvalidRequest, QueueFull, QuotaExceeded
from tests.support.http_rig import CHATS, COMPLETIONS, EMBEDDINGS, HELLO, MESSAGES, RESPONSES, HttpRig, chunk, vector
from tests.support.router_parts import MODEL

COMPLETION: dict[str, Any] = {"prompt": "ab"}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "hi"}
MESSAGE: dict[str, Any] = {"model": MODEL, "max_tokens": 5, **HELLO}
TWO_INPUTS: dict[str, Any] = {"input": ["a", "b"]}
RANKED: dict[str, Any] = {"query": "q", "documents": ["a", "b"]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, COMPLETION), (RESPONSES, RESPONSE)])
@pytest.mark.parametrize(
    ("error", "status", "kind", "headers"),
    [
        (InvalidRequest("prompt", "is bad"), 400, "invalid_request_error", {}),
        (DeadlineExceeded("late"), 504, "timeout_error", {"x-should-retry": "false"}),
        (EngineFault("NaN"), 500, "server_error", {"x-should-retry": "false"}),
        (QuotaExceeded("2 run", 0.5), 429, "rate_limit_error", {"retry-after": "1", "x-should-retry": "true"}),
        (QueueFull("no room", 2.5), 503, "overloaded_error", {"retry-after": "3", "retry-after-ms": "2500"}),
        (Draining("bye"), 503, "overloaded_error", {"retry-after": "1", "x-should-retry": "true"}),
    ],
)
async def test_an_error_before_the_first_token_is_an_http_status(
    path: str, body: dict[str, Any], stream: bool, error: Exception, status: int, kind: str, headers: dict[str, str]
) -> None:
    exchange = await HttpRig().answered(path, body | {"stream": stream}, error, headers={"x-request-id": "mine"})
    assert (exchange.status, exchange.error["type"]) == (status, kind)
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


@pytest.mark.parametrize(
    ("path", "body", "num_calls", "num_events"),
    [
        (COMPLETIONS, COMPLETION, 1, 1),
        (COMPLETIONS, {"prompt": ["a", "b"]}, 2, 1),
        (RESPONSES, RESPONSE, 1, 5),
        (MESSAGES, MESSAGE, 1, 4),
        (EMBEDDINGS, TWO_INPUTS, 2, 0),
        ("/rerank", RANKED, 2, 0),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_requests(
    path: str, body: dict[str, Any], num_calls: int, num_events: int, stream: bool
) -> None:
    """`num_events`: those of a stream after its first chunk."""
    rig = HttpRig()
    exchange = rig.post(path, body | ({"stream": stream} if num_events else {}))
    calls = await rig.next_calls(num_calls)
    if num_events:
        calls[0].tell(chunk(0, "c"))
        await exchange.wait_for_events(num_events if stream else 0)
    exchange.disconnect()
    for call in calls:
        await call.is_closed.wait()
    await exchange.task
    assert not exchange.is_complete
    assert rig.store.stats().num_responses == 0


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [(EMBEDDINGS, {"input": ["a", "b", "c"]}, "input"), ("/rerank", RANKED | {"documents": ["a", "b"]}, "documents")],
)
@pytest.mark.parametrize(("error", "status"), [(InvalidRequest("prompt", "is bad"), 400), (EngineFault("broken"), 500)])
async def test_one_failed_input_fails_the_call_and_ends_the_others(
    path: str, body: dict[str, Any], names: str, error: Exception, status: int
) -> None:
    """Three inputs are sent at once; the texts of a cosine are embedded, too."""
    rig = HttpRig()
    exchange = rig.post(path, body)
    first, second, third = await rig.next_calls(3)
    first.tell(vector(1, 0))
    second.tell(error)
    await exchange.end()
    bad = f"{names}[{1 if path == EMBEDDINGS else 0}]"
    assert (exchange.status, exchange.error["param"]) == (status, bad if status == 400 else None)
    await third.is_closed.wait()

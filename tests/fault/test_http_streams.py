"""A stream over HTTP survives its router: another router needs only the id of its last event."""

from __future__ import annotations

import asyncio
import signal

from tests.support.http_streams import sse, tokens_of
from tests.support.process_cluster import ClusterSession
from tests.support.slow_model import expected_tokens_of, slow_request


async def test_a_stream_continues_at_another_router(session: ClusterSession) -> None:
    request = slow_request("over-http", chunks=1, max_tokens=12)
    body: dict[str, object] = {
        "prompt": request.prompt,
        "temperature": 0,
        "max_tokens": 12,
        "stream": True,
        "return_token_ids": True,
    }
    first, second = (process for process in session.cluster.state.processes if process.role == "router")
    name = {"x-request-id": request.request_id}

    def kill() -> None:
        session.cluster.signal(first.name, signal.SIGKILL)

    cut = await asyncio.to_thread(sse, f"http://{first.http_address}/v1/completions", body, name, 3, kill)
    assert 0 < len(tokens_of(cut)) < 12
    headers = name | {"last-event-id": cut[-1][0]}
    rest = await asyncio.to_thread(sse, f"http://{second.http_address}/v1/completions", body, headers)
    assert tokens_of(cut) + tokens_of(rest) == expected_tokens_of(request)
    assert rest[-1][1] == "[DONE]"
    back = await session.wait_until_replaced(first)
    assert back.http_address == first.http_address

"""A node that is told to end while it works: no request is lost or repeated, and its successor takes over."""

from __future__ import annotations

import asyncio

import pytest

from baton.wire.clients.node_client import NodeClient
from router.placement.reasons import MOVED
from tests.support.process_cluster import ClusterSession
from tests.support.slow_model import assert_undisturbed, slow_request


@pytest.mark.parametrize(
    ("role", "event"), [("prefill", "chunk_computed"), ("decode", "read_done"), ("decode", "remote_kv_arrived")]
)
async def test_a_node_that_drains_at_an_event_loses_no_request(session: ClusterSession, role: str, event: str) -> None:
    request = slow_request(f"drains-{role}-{event}", chunks=3, max_tokens=12)
    answering = asyncio.create_task(session.generate(request))
    name = await session.wait_for_event(role, event, request.request_id)
    before = session.cluster.process(name)
    client = NodeClient(before.address)
    await client.drain()
    await client.close()
    elsewhere = slow_request(f"meanwhile-{role}-{event}", chunks=1)
    for one, answer in ((elsewhere, await session.generate(elsewhere)), (request, await answering)):
        assert_undisturbed(answer, one)
        assert answer.end.path.attempts == 1 or answer.end.path.reason == MOVED.text or one is elsewhere
    now = await session.wait_until_replaced(before)
    assert now.last_exit == "has ended with exit code 0"

"""A client that leaves in each stage of its request, over real processes: no node keeps a block for it."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import DeadlineExceeded
from tests.support.process_cluster import ClusterSession
from tests.support.slow_model import assert_undisturbed, slow_request


@pytest.mark.parametrize(
    ("stage", "role", "event", "count"),
    [
        ("accepted", "decode", "queued", 1),
        ("computing", "prefill", "chunk_computed", 1),
        ("moving", "decode", "read_done", 2),
        ("streaming", "decode", "remote_kv_arrived", 1),
    ],
)
async def test_a_client_that_leaves_at_a_stage_frees_all_blocks(
    session: ClusterSession, stage: str, role: str, event: str, count: int
) -> None:
    request = slow_request(f"leaves-{stage}", chunks=3, max_tokens=40)
    call = session.call(request)
    await call.read()
    await session.wait_for_event(role, event, request.request_id, count)
    call.cancel()
    await session.wait_until_idle()
    for name in (*session.cluster.nodes("prefill"), *session.cluster.nodes("decode")):
        events = [e.name for e in await session.trace(name, request.request_id)]
        assert not events or "abort" in events, "who had to do with it was told"


async def test_a_client_that_leaves_while_its_request_is_queued(session: ClusterSession) -> None:
    stays = [slow_request(f"stays-{i}", chunks=2) for i in range(4)]
    answering = [asyncio.create_task(session.generate(request)) for request in stays]
    for request in stays:
        await session.wait_for_event("decode", "subscribed", request.request_id)
    leaver = session.call(slow_request("leaves-queue", chunks=4))
    await leaver.read()
    await session.wait_for_event("prefill", "queued", "leaves-queue")
    leaver.cancel()
    for answer, request in zip(await asyncio.gather(*answering), stays, strict=True):
        assert_undisturbed(answer, request)
        assert answer.end.path.attempts == 1


async def test_a_deadline_in_mid_stream(session: ClusterSession) -> None:
    request = slow_request("deadline", chunks=4)
    with pytest.raises(DeadlineExceeded):
        await session.generate(request, timeout_s=1.0)
    await session.wait_until_idle()

"""SIGKILL of Redis, which is not on the data path."""

from __future__ import annotations

import asyncio
import signal

from baton.registry.embedded import embedded_redis
from baton.registry.registry import Registry
from tests.support.process_cluster import ClusterSession
from tests.support.slow_model import assert_undisturbed, slow_request


async def test_killing_redis_disturbs_no_request(session: ClusterSession) -> None:
    incarnations = {p.incarnation for p in session.cluster.state.processes if p.role != "redis"}
    running = slow_request("redis-dies", chunks=2, max_tokens=12)
    answering = asyncio.create_task(session.generate(running))
    await session.wait_for_event("prefill", "chunk_computed", running.request_id)
    # The supervisor is stopped, too, so Redis stays away until the status is read.
    with session.cluster.stopped(session.cluster.state.pid):
        before = session.cluster.signal("redis", signal.SIGKILL)
        status = await session.wait_for_status(lambda found: found.health != "ok")
        assert status.health == "degraded"
        assert "registry" in status.detail
        assert_undisturbed(await answering, running)
        for request in (slow_request("no-redis-0", chunks=2), slow_request("no-redis-1", chunks=2, sampled=True)):
            answer = await session.generate(request)
            assert_undisturbed(answer, request)
            assert (answer.end.path.attempts, bool(answer.end.path.prefill_node)) == (1, True)
    now = await session.wait_until_replaced(before)
    assert now.last_exit == "was ended by SIGKILL"
    assert {p.incarnation for p in session.cluster.state.processes if p.role != "redis"} == incarnations
    registry = Registry.connect(embedded_redis(session.cluster.run_dir).url, "default")
    try:
        async for snapshot in registry.watch():
            # Redis keeps nothing on disk, so each process has registered again.
            if {record.incarnation for record in snapshot.values()} == incarnations:
                break
    finally:
        await registry.close()

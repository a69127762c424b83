"""The hand-off and its worst fault over TCP only; all other tests use the transport that UCX prefers here."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from tests.support.process_cluster import process_cluster
from tests.support.slow_model import FLAGS, STEP_TIMES, assert_undisturbed, slow_request


async def test_hand_offs_and_their_faults_over_tcp_only(tmp_path: Path, model: Path) -> None:
    environment = {**STEP_TIMES, "UCX_TLS": "tcp,self"}
    with process_cluster(tmp_path / "run", model, *FLAGS, environment=environment) as cluster:
        async with cluster.session() as session:
            await session.wait_until_whole()
            request = slow_request("tcp-plain", sampled=True)
            answer = await session.generate(request)
            assert_undisturbed(answer, request)
            assert (answer.end.path.attempts, answer.end.kv_bytes > 0) == (1, True)

            request = slow_request("tcp-dies", chunks=6, sampled=True)
            answering = asyncio.create_task(session.generate(request))
            await session.wait_for_event("decode", "read_done", "tcp-dies")
            before = cluster.signal("prefill-0", signal.SIGKILL)
            answer = await answering
            assert_undisturbed(answer, request)
            assert answer.end.path.attempts == 2
            first = [e.name for e in await session.trace("decode-0", "tcp-dies") if e.attempt.attempt == 1]
            assert "kv_arrived" not in first
            await session.wait_until_replaced(before)
            await session.wait_until_idle()

            request = slow_request("tcp-again")
            answer = await session.generate(request)
            assert_undisturbed(answer, request)
            assert (answer.end.path.attempts, answer.end.path.prefill_node) == (1, "prefill-0")
            await session.wait_until_idle()

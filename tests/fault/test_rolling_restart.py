"""Both routers are told to end, one after the other, while they stream answers: no node computes anything again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client import AsyncGenerationClient
from tests.fault.test_lost_routers import Watched, routers
from tests.support.always_first import AlwaysFirst
from tests.support.process_cluster import ProcessCluster, process_cluster
from tests.support.slow_model import FLAGS, STEP_TIMES, assert_undisturbed, slow_request


@pytest.fixture
def impatient(tmp_path: Path, model: Path) -> Iterator[ProcessCluster]:
    """A cluster whose routers hand their requests over at once when they are told to end."""
    sizes = ("--prefill", "1", "--decode", "1", "--routers", "2", "--drain-s", "0.1")
    with process_cluster(tmp_path / "run", model, *FLAGS, *sizes, environment=STEP_TIMES) as running:
        yield running


async def test_a_rolling_restart_of_routers_hands_their_requests_over(
    impatient: ProcessCluster,
) -> None:
    async with impatient.session() as session:
        await session.wait_until_whole()
        requests = [
            slow_request("streams", 1, 24),
            slow_request("sampled", 1, 20, sampled=True),
            slow_request("begins", 4, 16),
        ]
        async with AsyncGenerationClient(*routers(session), rng=AlwaysFirst()) as client:
            watched = Watched(client)
            answering = [asyncio.create_task(watched.generate(request)) for request in requests]
            for name, count in (("router-0", 3), ("router-1", 8)):
                await watched.wait_for_tokens(requests[0], count)
                before = impatient.process(name)
                os.kill(before.pid, signal.SIGTERM)
                await session.wait_until_replaced(before)
            answers = await asyncio.gather(*answering)
        for request, answer in zip(requests, answers, strict=True):
            assert_undisturbed(answer, request)
        assert [answer.end.path.attempts for answer in answers] == [1, 1, 1]
        assert answers[0].end.path.reason == "adopted from another router"

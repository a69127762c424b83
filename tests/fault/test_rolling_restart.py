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
from tests.support.first_of_all import FirstOfAll
from tests.support.process_cluster import ProcessCluster, process_cluster
from tests.support.slow_model import FLAGS, STEP_TIMES, ask, assert_right


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
        await session.whole()
        requests = [ask("streams", 1, 24), ask("sampled", 1, 20, sampled=True), ask("begins", 4, 16)]
        async with AsyncGenerationClient(*routers(session), rng=FirstOfAll()) as client:
            watched = Watched(client)
            answering = [asyncio.create_task(watched.ask(request)) for request in requests]
            for name, count in (("router-0", 3), ("router-1", 8)):
                await watched.told(requests[0], count)
                before = impatient.process(name)
                os.kill(before.pid, signal.SIGTERM)
                await session.back(before)
            answers = await asyncio.gather(*answering)
        for request, answer in zip(requests, answers, strict=True):
            assert_right(answer, request)
        assert [answer.end.path.attempts for answer in answers] == [1, 1, 1]
        assert answers[0].end.path.reason == "adopted from another router"

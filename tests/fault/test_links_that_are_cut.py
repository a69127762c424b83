"""A router whose links to its nodes break for a moment, or that hangs until they break, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from baton.messages.generation import Finished, GenerateRequest
from baton.messages.sampling import SamplingParams
from router.flight.flight_table import AttemptCause
from tests.support.simulated_cluster import Answer, SimulatedCluster, SimulatedLimits, simulated_cluster
from tests.support.simulated_oracle import expected_tokens
from tests.support.virtual_time import VirtualTimeLoop, run_virtually

PROMPT = list(range(30))
LIMITS = SimulatedLimits(num_blocks=64)
NUM_TOKENS = 80
EXPECTED = expected_tokens(PROMPT, SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_TOKENS), LIMITS.spec)


def a_moment(cluster: SimulatedCluster) -> None:
    cluster.cut_links()


def a_hang(cluster: SimulatedCluster) -> None:
    """Nodes close the streams of a router that does not answer for 15 s; the router notices when it continues."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.stall_for(16.0)
    cluster.cut_links()


@pytest.mark.parametrize("cut", [a_moment, a_hang])
def test_a_router_continues_its_requests_when_its_links_are_back(
    cut: Callable[[SimulatedCluster], None],
) -> None:
    run_virtually(_in_mid_stream(cut))


async def cut_at(cluster: SimulatedCluster, num_tokens: int, cut: Callable[[SimulatedCluster], None]) -> Finished:
    """Send a request, cut its links after this many tokens, and read it to the end. An `Answer` accepts no gap and no
    repeated token."""
    answer, is_cut = Answer(), False
    async for event in cluster.dispatcher.generate(
        GenerateRequest(PROMPT, "r", temperature=0.0, max_tokens=NUM_TOKENS)
    ):
        answer.note(event)
        if len(answer.token_ids) >= num_tokens and not is_cut:
            is_cut = True
            cut(cluster)
    assert answer.token_ids == EXPECTED
    assert answer.finished is not None
    return answer.finished


async def _in_mid_stream(cut: Callable[[SimulatedCluster], None]) -> None:
    async with simulated_cluster(Random(1), limits=LIMITS) as cluster:
        finished = await cut_at(cluster, 20, cut)
        assert finished.path.attempts == 1
        assert cluster.dispatcher.requests.counters.attempts == {AttemptCause.FIRST: 1}
        assert cluster.dispatcher.requests.counters.links_back == 2
        told = [event.name for event in cluster.nodes["decode-0"].log.after(0)]
        assert (told.count("adopted"), told.count("abort")) == (1, 0)
        await cluster.wait_until_idle(30.0)
        for node in cluster.nodes.values():
            node.assert_nothing_is_left()


def test_the_end_of_a_request_is_received_after_its_links_were_cut() -> None:
    run_virtually(_ends_meanwhile())


async def _ends_meanwhile() -> None:
    """The node generates the last tokens while its links are cut."""
    async with simulated_cluster(Random(1), limits=LIMITS) as cluster:
        finished = await cut_at(cluster, NUM_TOKENS - 3, a_moment)
        assert finished.path.attempts == 1

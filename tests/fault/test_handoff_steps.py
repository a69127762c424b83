"""A kill, a stop and a link that loses one direction at every step of the hand-off's protocol, in virtual time.

One node of a pair fails exactly at the step. Its peer and its router notice, the node or its successor takes part
again, and the request ends with the tokens of an undisturbed run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from baton.failpoints import set_injector
from baton.messages.generation import Finished, GenerateRequest
from baton.messages.sampling import SamplingParams
from tests.support.handoff_failpoints import HANDOFF_FAILPOINTS, REPEATED_FAILPOINTS, SENDER
from tests.support.simulated_cluster import SimulatedCluster, SimulatedLimits, simulated_cluster
from tests.support.simulated_oracle import expected_tokens
from tests.support.virtual_time import run_virtually

LIMITS = SimulatedLimits(num_blocks=24, chunk=8)
PROMPT = [Random(4).randrange(LIMITS.spec.vocab_size) for _ in range(30)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
BOUND_S = 30.0
"""Virtual seconds for the request and for what it leaves behind: a node that is lost is noticed after 3, one that has
to come back is there after 8."""

Fault = Callable[[SimulatedCluster, str], asyncio.Task[None]]
"""Applies a fault to a node at once; the returned task brings the node back."""


@pytest.fixture(autouse=True)
def no_failpoints() -> Iterator[None]:
    yield
    set_injector(None)


class NthFailpoint:
    """A failpoint that applies its fault once, when the step is reached for the n-th time."""

    def __init__(self, cluster: SimulatedCluster, place: str, count: int, fault: Fault) -> None:
        self.recovery: asyncio.Task[None] | None = None
        """Of what it has struck."""
        self._cluster = cluster
        self._place = place
        self._left = count
        self._fault = fault
        set_injector(self._strike)

    def _strike(self, name: str, request_id: str) -> None:
        self._left -= name == self._place
        if self._left == 0 and self.recovery is None:
            node_id = "prefill-0" if self._place.removesuffix("-done") in SENDER else "decode-0"
            self.recovery = self._fault(self._cluster, node_id)


async def _survives(place: str, count: int, fault: Fault, attempts: int | None = None) -> None:
    """`attempts`: the exact number of attempts that the request takes."""
    limits = replace(LIMITS, meets_senders=place != "Connected")
    async with simulated_cluster(Random(1), limits=limits) as cluster:
        drill = NthFailpoint(cluster, place, count, fault)
        disturbed = await _asks(cluster, PROMPT)
        assert attempts in (None, disturbed.path.attempts)
        assert drill.recovery is not None, "nobody came by"
        await drill.recovery
        await cluster.wait_until_idle(BOUND_S)
        for node in cluster.nodes.values():
            node.assert_nothing_is_left()
        await cluster.wait_until_whole()
        undisturbed = await _asks(cluster, PROMPT[::-1])
        assert (undisturbed.path.attempts, undisturbed.kv_bytes > 0) == (1, True)
        await cluster.wait_until_idle(BOUND_S)


async def _asks(cluster: SimulatedCluster, prompt: list[int]) -> Finished:
    async with asyncio.timeout(BOUND_S):
        answer = await cluster.generate(GenerateRequest(prompt, "r", temperature=0.0, max_tokens=8))
    assert answer.token_ids == expected_tokens(prompt, PARAMS, LIMITS.spec)
    assert answer.finished is not None
    return answer.finished


def _later(recover: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(recover, name="recovery")


def _kill(cluster: SimulatedCluster, node_id: str) -> asyncio.Task[None]:
    async def successor() -> None:
        await asyncio.sleep(0.5)
        await cluster.start(node_id)

    cluster.kill(node_id)
    return _later(successor())


def _stop(cluster: SimulatedCluster, node_id: str, seconds: float) -> asyncio.Task[None]:
    async def go_on() -> None:
        await asyncio.sleep(seconds)
        cluster.resume(node)

    node = cluster.nodes[node_id]
    cluster.stop(node)
    return _later(go_on())


def _hold(cluster: SimulatedCluster, source_id: str, target_id: str, seconds: float) -> asyncio.Task[None]:
    """Loses all messages of one direction of the link."""

    async def let_through() -> None:
        await asyncio.sleep(seconds)
        cluster.network.let_through(*ends)

    ends = cluster.nodes[source_id].incarnation, cluster.nodes[target_id].incarnation
    cluster.network.hold(*ends)
    return _later(let_through())


@pytest.mark.parametrize(
    ("place", "count"), [*((place, 1) for place in HANDOFF_FAILPOINTS), *((place, 2) for place in REPEATED_FAILPOINTS)]
)
def test_a_node_killed_at_a_step_of_the_hand_off(place: str, count: int) -> None:
    run_virtually(_survives(place, count, _kill))


@pytest.mark.parametrize("seconds", [0.5, 8.0], ids=["shortly", "long"])
@pytest.mark.parametrize("place", HANDOFF_FAILPOINTS)
def test_a_node_stopped_at_a_step_of_the_hand_off(place: str, seconds: float) -> None:
    attempts = 1 if seconds < 1 else None
    run_virtually(_survives(place, 1, lambda cluster, node_id: _stop(cluster, node_id, seconds), attempts))


@pytest.mark.parametrize("seconds", [0.5, 8.0], ids=["shortly", "long"])
@pytest.mark.parametrize("ends", [("prefill-0", "decode-0"), ("decode-0", "prefill-0")], ids=["down", "up"])
@pytest.mark.parametrize("place", HANDOFF_FAILPOINTS)
def test_a_link_that_loses_one_direction_at_a_step(place: str, ends: tuple[str, str], seconds: float) -> None:
    attempts = 1 if seconds < 1 else None
    run_virtually(_survives(place, 1, lambda cluster, node_id: _hold(cluster, *ends, seconds), attempts))

"""Pairs of nodes whose links live and whose bytes do not move, over a whole cluster in virtual time.

That is known by name before a request depends on it, streams end right on other pairs, and the pair comes back by
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import pytest

from baton.errors import TransferCause, TransferFailed
from baton.messages.generation import GenerateRequest
from baton.messages.node_report import KV_PROBE_FAILED, ProbeFault
from baton.messages.sampling import SamplingParams
from baton.node.kv import sender_links as senders
from baton.node.kv.intake import Intake
from kv_transfer.receiver.probe_values import ProbeState, ProbeTimes
from tests.doubles.faulty_transfer_backend import Faults
from tests.support.simulated_cluster import (
    BLOCK_SIZE,
    SimulatedCluster,
    SimulatedLimits,
    SimulatedNode,
    simulated_cluster,
)
from tests.support.simulated_oracle import expected_tokens
from tests.support.virtual_time import run_virtually, virtually

LIMITS = SimulatedLimits(num_blocks=96, chunk=8)
TIMES = ProbeTimes()
FAILED_WITHIN_S = TIMES.tick_s * (TIMES.max_quiet_ticks + 2)
BACK_WITHIN_S = TIMES.max_pause_s + FAILED_WITHIN_S


def intake(cluster: SimulatedCluster, node_id: str = "decode-0") -> Intake:
    half = cluster.nodes[node_id].half
    assert isinstance(half, Intake)
    return half


def details(cluster: SimulatedCluster) -> dict[str, str]:
    """What routers show beside each node that has something to show."""
    return {node.name: node.detail for node in cluster.view.statuses(0.0, 0.0) if node.detail}


@asynccontextmanager
async def cluster_with_a_dead_data_path() -> AsyncIterator[tuple[SimulatedCluster, SimulatedNode]]:
    """A cluster with a healthy prefill node and one, prefill-1, whose memory can't be read though its link lives."""
    async with simulated_cluster(Random(1), limits=LIMITS) as cluster:
        broken = await cluster.start("prefill-1")
        cluster.fabric.freeze(broken.incarnation)
        await cluster.wait_until_whole()
        yield cluster, broken
        cluster.fabric.thaw(broken.incarnation)
        await cluster.wait_until_idle(30.0)
        for node in cluster.nodes.values():
            node.assert_nothing_is_left()


async def generate(cluster: SimulatedCluster, number: int) -> str:
    """Run a request and check its tokens; returns its prefill node."""
    rng = Random(number)
    prompt = [rng.randrange(LIMITS.spec.vocab_size) for _ in range(30)]
    answer = await cluster.generate(GenerateRequest(prompt, f"r{number}", temperature=0.0, max_tokens=8))
    assert answer.error is None
    assert answer.token_ids == expected_tokens(prompt, SamplingParams(temperature=0.0, max_tokens=8), LIMITS.spec)
    assert answer.finished is not None
    return answer.finished.path.prefill_node


@virtually
async def test_a_dead_data_path_is_named_on_both_nodes_before_any_request() -> None:
    async with cluster_with_a_dead_data_path() as (cluster, broken):
        await asyncio.sleep(FAILED_WITHIN_S)
        for half, peer in ((intake(cluster), "prefill-1"), (broken.half, "decode-0")):
            (seen,) = half.report().failed_probes
            assert (seen.peer, seen.fault) == (peer, ProbeFault.TIMED_OUT)
        assert cluster.nodes["prefill-0"].half.report().failed_probes == []
        await asyncio.sleep(1.0)
        shown = details(cluster)
        assert set(shown) == {"prefill-1", "decode-0"}
        assert all(detail.startswith(f"{KV_PROBE_FAILED}: decode-0 could not read") for detail in shown.values())


@virtually
async def test_streams_end_right_on_other_pairs_and_the_pair_comes_back() -> None:
    async with cluster_with_a_dead_data_path() as (cluster, broken):
        # The requests that come first wait for the probe, as they would for the link.
        places = await asyncio.gather(*(generate(cluster, number) for number in range(8)))
        assert set(places) == {"prefill-0"}
        cluster.fabric.thaw(broken.incarnation)
        await asyncio.sleep(BACK_WITHIN_S)
        assert intake(cluster).failed_probes() == broken.half.failed_probes() == []
        assert details(cluster) == {}
        places = await asyncio.gather(*(generate(cluster, number) for number in range(8, 24)))
        assert set(places) == {"prefill-0", "prefill-1"}


@virtually
async def test_the_condition_goes_with_the_node() -> None:
    async with cluster_with_a_dead_data_path() as (cluster, _):
        await asyncio.sleep(FAILED_WITHIN_S)
        cluster.kill("prefill-1")
        await asyncio.sleep(BACK_WITHIN_S)
        assert intake(cluster).failed_probes() == []
        successor = await cluster.start("prefill-1")
        await cluster.wait_until_whole()
        await cluster.wait_until_joined()
        assert intake(cluster).failed_probes() == successor.half.failed_probes() == []
        places = await asyncio.gather(*(generate(cluster, number) for number in range(16)))
        assert set(places) == {"prefill-0", "prefill-1"}


def test_failed_senders_are_probed_again_though_there_are_more_than_absent_ones_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(senders, "MAX_ABSENT", 1)

    async def main() -> None:
        async with cluster_with_a_dead_data_path() as (cluster, broken):
            other = await cluster.start("prefill-2")
            cluster.fabric.freeze(other.incarnation)
            await cluster.wait_until_whole()
            await asyncio.sleep(BACK_WITHIN_S)
            assert {failed.peer for failed in intake(cluster).failed_probes()} == {"prefill-1", "prefill-2"}
            cluster.fabric.thaw(broken.incarnation)
            cluster.fabric.thaw(other.incarnation)
            await asyncio.sleep(BACK_WITHIN_S)
            assert intake(cluster).failed_probes() == []
            states = [intake(cluster).probes.state(node.incarnation) for node in (broken, other)]
            assert states == [ProbeState.PASSED] * 2

    run_virtually(main())


@virtually
async def test_a_stopped_node_is_a_lost_one_and_no_failed_probe() -> None:
    async with simulated_cluster(Random(1), limits=LIMITS) as cluster:
        stopped = await cluster.start("prefill-1")
        cluster.stop(stopped)
        await asyncio.sleep(FAILED_WITHIN_S)
        assert intake(cluster).failed_probes() == []
        cluster.resume(stopped)
        await cluster.wait_until_whole()
        assert await generate(cluster, 1) in ("prefill-0", "prefill-1")


@virtually
async def test_a_link_that_was_lost_is_opened_again_without_a_request() -> None:
    async with simulated_cluster(Random(1), limits=LIMITS) as cluster:
        stopped = await cluster.start("prefill-1")
        await cluster.wait_until_joined()
        probes = intake(cluster).probes
        cluster.stop(stopped)
        await asyncio.sleep(FAILED_WITHIN_S)
        assert probes.state(stopped.incarnation) is None
        cluster.resume(stopped)
        await asyncio.sleep(BACK_WITHIN_S)
        # The pair has a link, and no other probe: one probe for two incarnations is enough.
        assert probes.state(stopped.incarnation) is not None
        assert probes.outcomes["prefill-1", "passed"] == 1
        await cluster.wait_until_whole()


@virtually
async def test_without_another_pair_the_error_says_why() -> None:
    limits = replace(LIMITS, meets_senders=False, on_transfer_failure="fail")
    async with simulated_cluster(Random(1), limits=limits) as cluster:
        cluster.fabric.freeze("prefill-0.1")
        answer = await cluster.generate(GenerateRequest([1] * 30, "r", temperature=0.0, max_tokens=8))
        assert isinstance(answer.error, TransferFailed)
        assert answer.error.cause is TransferCause.PROBE_FAILED
        cluster.fabric.thaw("prefill-0.1")


class CorruptingCluster(SimulatedCluster):
    """A cluster in which every read of known bytes brings a flipped bit to the node that reads."""

    has_faults_in_probes = True


@virtually
async def test_bytes_that_arrive_wrong_are_named_so_and_never_used() -> None:
    faults = [Faults(), Faults(), Faults(corrupt=1.0)]
    async with simulated_cluster(
        Random(1), prefill=1, decode=2, limits=LIMITS, faults=lambda: faults.pop(0), cluster=CorruptingCluster
    ) as cluster:
        (seen,) = intake(cluster, "decode-1").failed_probes()
        assert seen.fault is ProbeFault.WRONG_BYTES
        assert intake(cluster, "decode-0").failed_probes() == []
        await asyncio.gather(*(generate(cluster, number) for number in range(8)))
        failed = [event.detail for event in cluster.nodes["decode-1"].log.after(0) if event.name == "kv_failed"]
        assert failed
        assert set(failed) <= {TransferCause.PROBE_FAILED.value}


@pytest.mark.parametrize("size", [BLOCK_SIZE // 2, 2 * BLOCK_SIZE])
def test_a_pair_with_blocks_of_different_sizes_is_probed_by_the_plan_of_its_reads(size: int) -> None:
    async def main(corrupt: float) -> None:
        limits = replace(LIMITS, prefill_block_size=size)
        async with simulated_cluster(
            Random(1), limits=limits, faults=lambda: Faults(corrupt=corrupt), cluster=CorruptingCluster
        ) as cluster:
            sender, probes = cluster.nodes["prefill-0"].incarnation, intake(cluster).probes
            seen = [failed.fault for failed in intake(cluster).failed_probes()]
            if corrupt:
                assert seen == [ProbeFault.WRONG_BYTES]
            else:
                assert (seen, probes.state(sender)) == ([], ProbeState.PASSED)
                assert await generate(cluster, 1) == "prefill-0"

    run_virtually(main(0.0))
    run_virtually(main(1.0))

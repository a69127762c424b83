"""A prefill node dies with the KV that was requested: the decode node follows its policy, over real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import TransferCause, TransferFailed
from tests.support.process_cluster import ClusterSession, ProcessCluster, process_cluster
from tests.support.requested_fault import RequestedFault
from tests.support.slow_model import BRISK_STEP_TIMES, FLAGS, assert_undisturbed, slow_request

PLACES = ("Subscribe-done", "closing-offer")


@pytest.fixture(scope="module", params=["recompute", "fail"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(
    policy: str, tmp_path_factory: pytest.TempPathFactory, model: Path, failpoints_dir: Path
) -> Iterator[ProcessCluster]:
    environment = {**BRISK_STEP_TIMES, "BATON_FAILPOINTS": str(failpoints_dir)}
    flags = (*FLAGS, "--prefill", "1", "--decode", "1", "--on-transfer-failure", policy)
    with process_cluster(tmp_path_factory.mktemp("watched") / "run", model, *flags, environment=environment) as running:
        yield running


@pytest.mark.parametrize("place", PLACES)
async def test_the_transfer_failure_policy_is_followed(
    session: ClusterSession, failpoints_dir: Path, policy: str, place: str
) -> None:
    wanted = slow_request(f"{policy}-{place}", chunks=3, sampled=True)
    before = {process.pid: process for process in session.cluster.state.processes}
    with RequestedFault(failpoints_dir, place, f"kill {wanted.request_id}") as fault:
        if policy == "recompute":
            answer = await session.generate(wanted)
            assert_undisturbed(answer, wanted)
            assert answer.end.path.attempts == 1, "nobody else was asked"
        else:
            with pytest.raises(TransferFailed) as lost:
                await session.generate(wanted)
            assert lost.value.cause is TransferCause.PEER_GONE
        assert fault.has_struck()
        killed = before[fault.pid]
    assert killed.role == "prefill"
    await session.wait_until_replaced(killed)
    await session.wait_until_idle()

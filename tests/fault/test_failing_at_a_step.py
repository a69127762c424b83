"""Nodes that die or stop exactly at a step of the hand-off's protocol, over real processes and both kinds of transport.

The request ends with the tokens of an undisturbed run, and all remaining processes are idle afterwards. The file that a
fault writes proves that it happened, and in which process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.cluster.state import ProcessState
from baton.messages.generation import GenerateRequest
from tests.support.caller import Answer
from tests.support.process_cluster import ClusterSession, ProcessCluster, process_cluster
from tests.support.requested_fault import RequestedFault
from tests.support.slow_model import BRISK_STEP_TIMES, FLAGS, assert_undisturbed, slow_request

KILLED = ("Subscribe-done", "read-posted", "closing-offer", "Begun", "ConfirmRead", "ReadConfirmed")
"""Steps of the prefill node and of the decode node in turns; test_handoff_steps has all steps, in virtual time."""
SENDERS = ("Subscribe-done", "closing-offer", "ConfirmRead")
NAMELESS = ("read-posted",)
"""Steps of the mover, which have no request id."""
STOPS = ("Offer-done", "ConfirmRead")


@pytest.fixture(scope="module", params=["default", "tcp,self"], ids=["default", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(
    transport: str, tmp_path_factory: pytest.TempPathFactory, model: Path, failpoints_dir: Path
) -> Iterator[ProcessCluster]:
    tls = {} if transport == "default" else {"UCX_TLS": transport}
    environment = {**BRISK_STEP_TIMES, **tls, "BATON_FAILPOINTS": str(failpoints_dir)}
    flags = (*FLAGS, "--prefill", "2", "--decode", "2")
    with process_cluster(tmp_path_factory.mktemp("watched") / "run", model, *flags, environment=environment) as running:
        yield running


async def _answered(session: ClusterSession, request: GenerateRequest) -> Answer:
    answer = await session.generate(request)
    assert_undisturbed(answer, request)
    return answer


def leave_to_the_other(transport: str, number: int) -> None:
    """Skip cases so that the kinds of transport take turns, unless BATON_FAULT_SCHEDULES asks for all."""
    if (number % 2 == 0) is not (transport == "default") and "BATON_FAULT_SCHEDULES" not in os.environ:
        pytest.skip("the other kind of transport has this step; with BATON_FAULT_SCHEDULES set both have all")


def _process(session: ClusterSession, pid: int) -> ProcessState:
    return next(process for process in session.cluster.state.processes if process.pid == pid)


@pytest.mark.parametrize("place", KILLED)
async def test_a_node_killed_at_a_step(
    session: ClusterSession, failpoints_dir: Path, place: str, transport: str
) -> None:
    leave_to_the_other(transport, KILLED.index(place) // 2)
    request = slow_request(f"killed-{place}", chunks=3, sampled=True)
    before = {process.pid: process for process in session.cluster.state.processes}
    with RequestedFault(failpoints_dir, place, "kill" if place in NAMELESS else f"kill {request.request_id}") as fault:
        await _answered(session, request)
        assert fault.has_struck()
        killed = before[fault.pid]
    assert killed.role == ("prefill" if place in SENDERS else "decode")
    await session.wait_until_replaced(killed)
    await session.wait_until_idle()


@pytest.mark.parametrize("place", STOPS)
async def test_a_node_stopped_at_a_step(
    session: ClusterSession, failpoints_dir: Path, place: str, transport: str
) -> None:
    leave_to_the_other(transport, STOPS.index(place))
    request = slow_request(f"stopped-{place}", chunks=3, sampled=True)
    with RequestedFault(failpoints_dir, place, f"stop {request.request_id}") as fault:
        answering = asyncio.create_task(_answered(session, request))
        await session.wait_for_status(lambda _: fault.has_struck())
        name = _process(session, fault.pid).name
        answer = await answering
        assert answer.end.path.attempts == 2
        assert name not in (answer.end.path.prefill_node, answer.end.path.decode_node)
    await session.wait_until_whole()
    await session.wait_until_idle()


async def test_a_blocked_event_loop_costs_no_link(
    session: ClusterSession, failpoints_dir: Path, transport: str
) -> None:
    leave_to_the_other(transport, 0)
    await session.wait_until_idle()
    request = slow_request("held-up", chunks=3)
    ended = _ended_links(session)
    # Longer than three heartbeats. The router waits for less and places the request on another decode node.
    with RequestedFault(failpoints_dir, "Offer", f"sleep 4.5 {request.request_id}") as fault:
        await _answered(session, request)
        assert fault.has_struck()
        assert _process(session, fault.pid).role == "decode"
    await session.wait_until_whole()
    await session.wait_until_idle()
    assert _ended_links(session) == ended


def _ended_links(session: ClusterSession) -> int:
    """The number of links to decode nodes that the prefill nodes have lost so far."""
    logs = (session.cluster.run_dir / "logs" / f"{name}.log" for name in session.cluster.nodes("prefill"))
    return sum("ended: " in line and '"event": "link ' in line for log in logs for line in log.read_text().splitlines())

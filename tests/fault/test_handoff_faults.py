"""Bugs in the event loop's part of a hand-off: requests would wait for ever, so the process ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from baton.background import BackgroundWatch, current_watch
from baton.errors import BackgroundFault
from baton.messages.generation import GenerateRequest
from baton.node.kv.intake import Intake
from baton.node.kv.offering import Offering
from tests.support.simulated_cluster import SimulatedCluster, simulated_cluster
from tests.support.virtual_time import virtually

WITHIN_S = 60.0


def _fail(*_: Any) -> Any:
    raise ZeroDivisionError("a fault of ours")


def _leases_due(cluster: SimulatedCluster, sender: Offering, _: Intake) -> None:
    sender.book.tick = _fail  # type: ignore[method-assign]
    cluster.network.hold("decode-0.1", "prefill-0.1")


def _reader_lost(cluster: SimulatedCluster, sender: Offering, _: Intake) -> None:
    sender.book.link_closed = _fail  # type: ignore[method-assign, assignment]
    cluster.kill("decode-0")


def _sender_lost(cluster: SimulatedCluster, _: Offering, reader: Intake) -> None:
    reader.book.peer_lost = _fail  # type: ignore[method-assign, assignment]
    cluster.kill("prefill-0")


def _link_wanted_again(cluster: SimulatedCluster, _: Offering, reader: Intake) -> None:
    reader.book.reopen = _fail  # type: ignore[method-assign, assignment]
    for connection in cluster.network.between("decode-0.1", "prefill-0.1"):
        connection.cut()


async def reading(reader: Intake) -> None:
    for _ in range(1000):
        if reader.mover.figures.reads_in_flight:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("no read was posted")


@pytest.mark.parametrize(
    ("happens", "kind"),
    [
        (_leases_due, "leases"),
        (_reader_lost, "link-closed"),
        (_sender_lost, "link"),
        (_link_wanted_again, "reopen-link"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@virtually
async def test_a_fault_in_a_hand_off_task_ends_the_process(
    happens: Callable[[SimulatedCluster, Offering, Intake], None], kind: str
) -> None:
    met: asyncio.Queue[BackgroundFault] = asyncio.Queue()
    current_watch.set(BackgroundWatch(met.put_nowait))
    async with simulated_cluster(Random(1), prefill=1, decode=1) as cluster:
        sender, reader = cluster.nodes["prefill-0"].half, cluster.nodes["decode-0"].half
        assert isinstance(sender, Offering)
        assert isinstance(reader, Intake)
        cluster.fabric.freeze("prefill-0.1")
        asking = asyncio.create_task(cluster.generate(GenerateRequest(list(range(30)), "r", max_tokens=8)))
        await reading(reader)
        happens(cluster, sender, reader)
        async with asyncio.timeout(WITHIN_S):
            fault = await met.get()
        assert str(fault) == f"background task {kind} failed: ZeroDivisionError('a fault of ours')"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

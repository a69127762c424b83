"""Links to senders: opened again while the sender is in the cluster, after pauses that double."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import grpc

from baton.messages.node import KVSource
from baton.testing.fake_mover import FakeMover
from baton.testing.fake_transfer_backend import FakeTransferBackend, FakeTransferFabric
from decode_node.intake import Intake
from kv_transfer.layout import LinkIdentity
from kv_transfer.mover.part_mover import DeliverEvent
from kv_transfer.mover.parts_mover import PartsMover
from tests.support.handoff_rig import LAYOUT, new_memory
from tests.support.virtual_time import LoopClock, run_virtually

P0 = KVSource("p0", "p0.x", "h:1")


def opened_at(
    play: Callable[[Intake], Awaitable[None]], on_try: Callable[[Intake, int], None] = lambda intake, number: None
) -> list[float]:
    """Play a test in virtual time, in which no link opens; returns when each was tried, in seconds. `on_try` is called
    while a link is opening, with the number of the attempt."""
    tried: list[float] = []

    async def main() -> None:
        loop, clock, memory, fabric = asyncio.get_running_loop(), LoopClock(), new_memory(), FakeTransferFabric()
        start = loop.time()

        def refuse(address: str) -> grpc.aio.Channel:
            tried.append(loop.time() - start)
            on_try(intake, len(tried))
            raise OSError(f"nobody listens on {address}")

        def make_mover(deliver: DeliverEvent) -> FakeMover:
            return FakeMover(lambda: FakeTransferBackend(fabric, "d0.x", memory), deliver, clock)

        intake = Intake(
            LinkIdentity("c", "d0", "d0.x", LAYOUT),
            partial(PartsMover.of_one, None, make_mover),
            lambda news: None,
            lambda name, attempt, value, detail: None,
            loop.call_soon,
            make_channel=refuse,
            clock=clock,
        )
        await play(intake)
        await intake.links.close()

    run_virtually(main())
    return tried


def test_a_link_that_does_not_open_is_tried_again_after_pauses_that_double() -> None:
    async def play(intake: Intake) -> None:
        intake.sender_joined(P0)
        await asyncio.sleep(250.0)

    assert opened_at(play) == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0, 183.0, 243.0]


def test_a_sender_that_has_left_the_cluster_is_not_tried_again() -> None:
    async def play(intake: Intake) -> None:
        intake.sender_joined(P0)
        await asyncio.sleep(5.0)
        intake.sender_left("p0.x")
        await asyncio.sleep(250.0)
        # One that is back begins with the shortest pause.
        intake.sender_joined(P0)
        await asyncio.sleep(2.0)

    assert opened_at(play) == [0.0, 1.0, 3.0, 255.0, 256.0]


def test_a_sender_that_leaves_while_its_link_is_opening_leaves_nothing_behind() -> None:
    async def play(intake: Intake) -> None:
        intake.sender_joined(P0)
        await asyncio.sleep(10.0)
        intake.sender_joined(P0)
        await asyncio.sleep(2.0)

    def leave(intake: Intake, number: int) -> None:
        if number == 3:
            intake.sender_left("p0.x")

    # The pause after its return is the shortest.
    assert opened_at(play, leave) == [0.0, 1.0, 3.0, 10.0, 11.0]


def test_the_longest_pause_stays_however_often_a_link_does_not_open() -> None:
    async def play(intake: Intake) -> None:
        intake.sender_joined(P0)
        await asyncio.sleep(66_000.0)

    tried = opened_at(play)
    assert len(tried) > 1100
    assert tried[-1] - tried[-2] == 60.0

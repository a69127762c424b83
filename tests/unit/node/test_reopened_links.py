"""Links to senders: opened again while the sender is in the cluster, after pauses that double."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import grpc
import pytest

from baton.engine.runner import KVLayout, LayerGeometry, LayerGroup
from baton.messages.ids import Peer
from baton.node.kv.intake import Intake
from baton.wire.liveness import PeerAccess
from kv_transfer.layout import LinkIdentity
from kv_transfer.link.link_messages import LinkWelcome, MemoryPart
from kv_transfer.mover.part_mover import DeliverEvent
from kv_transfer.mover.parts_mover import OwnPart, PartsMover
from kv_transfer.receiver.join_probe import JoinProbes
from kv_transfer.receiver.transfer import TransferBook
from tests.doubles.fake_mover import FakeMover
from tests.doubles.fake_transfer_backend import FakeTransferBackend, FakeTransferFabric
from tests.support.handoff_rig import LAYOUT, new_memory
from tests.support.virtual_time import LoopClock, run_virtually

P0 = Peer("p0", "p0.x", "h:1")
WHOLE = (range(4),)
IN_TWO = (range(2), range(2, 4))


def opened_at(
    play: Callable[[Intake], Awaitable[None]],
    on_try: Callable[[Intake, int], None] = lambda intake, number: None,
    layout: KVLayout | None = None,
    parts: Sequence[range] = (range(1),),
) -> list[float]:
    """Play a test in virtual time, in which no link opens; returns when each was tried, in seconds. `on_try` is called
    while a link is opening, with the number of the attempt. `parts`: the layers of the reader's."""
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
            partial(PartsMover, layout, [OwnPart(layers, make_mover) for layers in parts]),
            TransferBook(digest_every=0, clock=clock),
            JoinProbes("d0", "d0.x", clock),
            lambda news: None,
            lambda name, attempt, value, detail: None,
            loop.call_soon,
            clock,
            PeerAccess(refuse),
            layout,
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


@pytest.mark.parametrize(
    ("ours", "theirs", "num_probed"),
    [(WHOLE, WHOLE, 1), (WHOLE, IN_TWO, 2), (IN_TWO, WHOLE, 2), (IN_TWO, IN_TWO, 2)],
)
def test_all_groups_of_layers_are_probed_where_a_node_is_in_parts(
    ours: Sequence[range], theirs: Sequence[range], num_probed: int
) -> None:
    groups = (LayerGroup((0, 1)), LayerGroup((2, 3), 64))
    layout = KVLayout(16, (LayerGeometry(2, 8, 8),) * 4, "float32", groups)
    others = [MemoryPart(layers, b"x", 4096, "DRAM", 0) for layers in theirs[1:]]
    welcome = LinkWelcome("p0", "p0.x", LAYOUT, b"x", 4096, 8, "DRAM", 0, 500, layers=theirs[0], other_parts=others)
    probed: list[int] = []

    def welcome_it(intake: Intake, number: int) -> None:
        intake.link_up(welcome)
        probed.append(intake.probes._probes["p0.x"].num_groups)

    async def play(intake: Intake) -> None:
        intake.sender_joined(P0)
        await asyncio.sleep(0.5)

    opened_at(play, welcome_it, layout, ours)
    assert probed == [num_probed]

"""The movers of a node's parts as one: what reaches which part, in which order, from which thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from baton.engine.runner import KVLayout
from baton.errors import BackgroundFault, ConfigError, EngineFault, TransferCause
from kv_transfer.backends.base import PeerMemory
from kv_transfer.layout import PeerNode, part_name
from kv_transfer.mover.part_mover import (
    BlockFilled,
    BlocksDigested,
    Connected,
    DeliverEvent,
    MoverEvent,
    ReadDone,
    ReadFailed,
    ReadFigures,
)
from kv_transfer.mover.parts_mover import OwnPart, PartsMover
from kv_transfer.piece_plan import ReadRange
from tests.support.mover_events import MoverEvents
from tests.support.virtual_time import run_virtually

LAYOUT = KVLayout.uniform(16, 4, 2, 64, "bfloat16")
IN_TWO = (range(2), range(2, 4))
WITHIN_S = 20.0


class RecordedMover:
    """A mover of a part that notes what it is told, and answers when the test says so."""

    figures = ReadFigures()
    fault: BaseException | None = None
    num_blocks = 8
    start_error: Exception | None = None

    def __init__(self, deliver: DeliverEvent) -> None:
        self.deliver: Callable[[Any], None] = deliver
        self.told: list[tuple[object, ...]] = []
        self.answer: Callable[[tuple[object, ...]], MoverEvent | None] = lambda call: None
        """The event with which it answers a call at once, in the same thread."""
        self.before: Callable[[], object] | None = None
        """What happens when it is called next, before it does anything."""

    def start(self) -> None:
        self._note("start")
        if self.start_error is not None:
            raise self.start_error

    def published(self, name: str) -> PeerMemory:
        return PeerMemory(name, b"x", 4096, self.num_blocks, 128, "DRAM", 0, 2)

    def connect(self, peer: PeerMemory) -> None:
        self._note("connect", peer.incarnation)

    def read(
        self,
        read_id: int,
        incarnation: str,
        ranges: Sequence[ReadRange],
        to_digest: Collection[int] = (),
        digest_parts: int = 1,
    ) -> None:
        self._note("read", read_id, incarnation)

    def fill(self, fill_id: int, block: int, seed: str, group: int = 0) -> None:
        self._note("fill", fill_id, block)

    def abandon(self, read_id: int) -> None:
        self._note("abandon", read_id)

    def disconnect(self, incarnation: str) -> None:
        self._note("disconnect", incarnation)

    def set_num_readers(self, num_readers: int) -> None:
        self._note("readers", num_readers)

    def stop(self) -> None:
        self._note("stop")

    async def watch_turns(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        await asyncio.Event().wait()

    def _note(self, *call: object) -> None:
        before, self.before = self.before, None
        if before is not None:
            before()
        self.told.append(call)
        event = self.answer(call)
        if event is not None:
            self.deliver(event)


class Rig:
    """A node in parts whose movers are recorded."""

    def __init__(self, parts: Sequence[range] = IN_TWO) -> None:
        self.events = MoverEvents()
        self.movers: list[RecordedMover] = []
        self.mover = PartsMover(LAYOUT, [OwnPart(layers, self._make) for layers in parts], self.events.put)

    def _make(self, deliver: DeliverEvent) -> RecordedMover:
        self.movers.append(RecordedMover(deliver))
        return self.movers[-1]

    def connect(self, parts: Sequence[range] = IN_TWO) -> PeerNode:
        memories = [
            PeerMemory(part_name("p", n), b"x", 4096, 8, 128, "DRAM", 0, 2, 16, layers)
            for n, layers in enumerate(parts)
        ]
        peer = PeerNode("p", memories)
        for mover in self.movers:
            mover.answer = lambda call: Connected(str(call[1])) if call[0] == "connect" else None
        self.mover.connect(peer)
        assert self.said() == [Connected("p")]
        for mover in self.movers:
            mover.told.clear()
        return peer

    def said(self) -> list[MoverEvent]:
        return self.events.left()


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture(autouse=True)
def watched(faults: queue.SimpleQueue[BackgroundFault]) -> None:
    """Faults end no process here."""


def sub_read(mover: RecordedMover) -> int:
    """The id of the last read that it was told of."""
    return next(call[1] for call in reversed(mover.told) if call[0] == "read")  # type: ignore[return-value]


def test_between_nodes_with_one_part_the_part_is_told_everything_and_says_everything() -> None:
    rig = Rig([range(4)])
    rig.connect([range(4)])
    (mover,) = rig.movers
    rig.mover.fill(-3, 8, "seed")
    rig.mover.read(-3, "p", [ReadRange(0, 0, 1)])
    rig.mover.read(7, "p", [ReadRange(0, 0, 1)], to_digest=[0])
    rig.mover.abandon(7)
    (fill, probe, read, abandoned) = (call[1] for call in mover.told)
    assert [call[0] for call in mover.told] == ["fill", "read", "read", "abandon"]
    assert isinstance(fill, int)
    assert isinstance(probe, int)
    assert isinstance(read, int)
    assert (probe < 0 < read, abandoned) == (True, read)
    for event in (
        ReadDone(read, 1, 0.0, 0.0, 1),
        BlocksDigested(read, {0: 3}),
        BlockFilled(fill, {1: 1}),
        ReadFailed(probe, TransferCause.CANCELLED, ""),
    ):
        mover.deliver(event)
    assert rig.said() == [
        ReadDone(7, 1, 0.0, 0.0, 1),
        BlocksDigested(7, {0: 3}),
        BlockFilled(-3, {1: 1}),
        ReadFailed(-3, TransferCause.CANCELLED, ""),
    ]
    rig.mover.disconnect("p")
    assert rig.mover.merge.num_open == 0


def test_a_node_with_one_part_divides_the_reads_of_a_peer_with_two() -> None:
    rig = Rig([range(4)])
    rig.connect()
    (mover,) = rig.movers
    rig.mover.read(7, "p", [ReadRange(0, 0, 1)])
    first, second = (call[1] for call in mover.told)
    assert [call[2] for call in mover.told] == ["p", "p/1"]
    mover.deliver(ReadDone(first, 5, 0.0, 0.0, 1))  # type: ignore[arg-type]
    assert rig.said() == []
    mover.deliver(ReadDone(second, 5, 0.0, 0.0, 1))  # type: ignore[arg-type]
    assert rig.said() == [ReadDone(7, 10, 0.0, 0.0, 2)]


def test_a_read_of_a_peer_comes_after_its_disconnection_that_is_being_carried_out() -> None:
    """The first part of the peer, which has the name of the peer, would bring its own layers alone."""
    rig = Rig([range(4)])
    rig.connect()
    (mover,) = rig.movers
    mover.before = lambda: rig.mover.read(7, "p", [ReadRange(0, 0, 1)])
    rig.mover.disconnect("p")
    assert mover.told == [("disconnect", "p"), ("disconnect", "p/1")]
    (refused,) = rig.said()
    assert isinstance(refused, ReadFailed)
    assert (refused.read_id, refused.cause) == (7, TransferCause.PEER_GONE)


def test_a_part_that_answers_while_it_is_told_something_is_heard(rig: Rig) -> None:
    """A mover that does not run answers from the calling thread."""
    rig.connect()
    rig.movers[0].answer = lambda call: (
        ReadFailed(call[1], TransferCause.CANCELLED, "stopped") if call[0] == "read" else None  # type: ignore[arg-type]
    )
    rig.mover.read(1, "p", [ReadRange(0, 0, 1)])
    assert rig.said() == []
    assert [call[0] for call in rig.movers[1].told] == ["read", "abandon"]
    rig.movers[1].deliver(ReadFailed(sub_read(rig.movers[1]), TransferCause.CANCELLED, ""))
    assert rig.said() == [ReadFailed(1, TransferCause.CANCELLED, "stopped")]


def test_a_call_of_another_thread_comes_after_what_is_being_carried_out(rig: Rig) -> None:
    """A read that is abandoned before its part has heard of it would never be."""
    rig.connect()
    abandoner = threading.Thread(target=rig.mover.abandon, args=(1,))

    def abandon_meanwhile() -> None:
        abandoner.start()
        abandoner.join(WITHIN_S)

    rig.movers[0].before = abandon_meanwhile
    rig.mover.read(1, "p", [ReadRange(0, 0, 1)])
    assert not abandoner.is_alive(), "a call returns at once"
    assert [[call[0] for call in mover.told] for mover in rig.movers] == [["read", "abandon"]] * 2


def test_an_event_that_can_not_be_delivered_ends_the_process(
    rig: Rig, faults: queue.SimpleQueue[BackgroundFault]
) -> None:
    rig.connect()

    def deliver(event: MoverEvent) -> None:
        raise ZeroDivisionError("listener")

    rig.mover._deliver = deliver
    rig.mover.read(1, "nobody", [ReadRange(0, 0, 1)])
    fault = faults.get_nowait()
    assert isinstance(fault.__cause__, ZeroDivisionError)
    assert rig.mover.fault is fault.__cause__
    rig.mover.read(2, "p", [ReadRange(0, 0, 1)])
    assert [call[0] for call in rig.movers[0].told] == ["read"], "it goes on for the others"


def test_figures_are_of_all_parts(rig: Rig) -> None:
    assert rig.mover.figures == ReadFigures()
    for number, mover in enumerate(rig.movers, 1):
        mover.figures = ReadFigures(number, number, number, 1)
    assert rig.mover.figures == ReadFigures(bytes_arrived=3, arrived_at=2, reads_in_flight=3, stuck_reads=2)
    assert rig.mover.fault is None
    rig.movers[1].fault = EngineFault("lost")
    assert rig.mover.fault is rig.movers[1].fault


def test_readers_are_told_to_all_parts_and_probe_blocks_are_those_of_each(rig: Rig) -> None:
    rig.mover.start()
    rig.mover.set_num_readers(3)
    assert rig.mover.probe_blocks == range(8, 10)
    assert [part.incarnation for part in rig.mover.published("d0").parts] == ["d0", "d0/1"]
    rig.mover.stop()
    assert [mover.told for mover in rig.movers] == [[("start",), ("readers", 3), ("stop",)]] * 2


def test_an_agent_that_does_not_start_stops_the_others(rig: Rig) -> None:
    rig.movers[1].start_error = ConfigError("no device")
    with pytest.raises(ConfigError, match="no device"):
        rig.mover.start()
    assert rig.movers[0].told == [("start",), ("stop",)]


def test_parts_with_unequal_numbers_of_blocks_are_refused(rig: Rig) -> None:
    rig.movers[1].num_blocks = 9
    with pytest.raises(ConfigError, match=r"\(8, 2\), \(9, 2\)"):
        rig.mover.start()
    assert [mover.told[-1] for mover in rig.movers] == [("stop",)] * 2


def test_parts_that_have_not_all_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.\.3 once and in order, and have 0\.\.1, 3\.\.3"):
        Rig([range(2), range(3, 4)])


def test_a_part_that_hangs_is_a_fault(rig: Rig) -> None:
    rig.movers[1].start_error = EngineFault("does not return")
    with pytest.raises(EngineFault, match="does not return"):
        run_virtually(rig.mover.watch_turns())

"""The mover of a part in another process: the node's end against a scripted part, and against the real other end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from baton.clock import SystemClock
from baton.engine.runner import KVLayout, KVMemory
from baton.errors import BackgroundFault, ConfigError, EngineFault, TransferCause
from baton.runner.blocks.block_digests import block_digests
from baton.runner.blocks.sub_blocks import WHOLE, Division
from kv_transfer.backends.base import PeerMemory, ReadHandle, ReadState, TransferBackend
from kv_transfer.mover.message_stream import MessageStream, StreamEnded, StreamLost
from kv_transfer.mover.mover_server import MoverServer
from kv_transfer.mover.part_mover import (
    BlockFilled,
    BlocksDigested,
    Connected,
    ConnectFailed,
    DigestsFailed,
    FillFailed,
    MoverEvent,
    ReadDone,
    ReadFailed,
    ReadStalled,
)
from kv_transfer.mover.remote_messages import (
    AskTurns,
    CancelRead,
    DigestBlocks,
    DigestsFound,
    DigestsNotFound,
    FillBlock,
    FromPart,
    MoverFault,
    MoverNotUp,
    MoverStopped,
    MoverUp,
    PeerNotConnected,
    ReadBlocks,
    SetNumReaders,
    StartMover,
    StopMover,
    ToPart,
    Turns,
    read_to_part,
    write_from_part,
    write_to_part,
)
from kv_transfer.mover.remote_mover import RemoteMover, digests_of_parts
from kv_transfer.piece_plan import ReadRange
from tests.doubles.fake_transfer_backend import FakeTransferBackend, FakeTransferFabric
from tests.support.mover_events import MoverEvents
from tests.support.tls_pair import tls_pair
from tests.support.virtual_time import run_virtually

LAYOUT = KVLayout.uniform(4, 4, 1, 8, "float32")
LAYERS = range(2, 4)
NUM_BLOCKS = 16
NUM_PROBE_BLOCKS = 2
WITHIN_S = 20.0
T = TypeVar("T")
UP = MoverUp(b"agent", 4096, NUM_BLOCKS, NUM_PROBE_BLOCKS, "DRAM", 0, LAYERS)


@pytest.fixture(autouse=True)
def watched(faults: queue.SimpleQueue[BackgroundFault]) -> None:
    """Faults end no node here."""


class ScriptedPart:
    """The other end of a stream, whose answers the test gives."""

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        self._stream = MessageStream(stream)
        self.told: queue.SimpleQueue[ToPart] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(StreamEnded):
            self._stream.run(lambda frame: self.told.put(read_to_part(frame)))

    def next(self) -> ToPart:
        return self.told.get(timeout=WITHIN_S)

    def next_of(self, kind: type[T]) -> T:
        message = self.next()
        assert isinstance(message, kind)
        return message

    def say(self, *messages: FromPart) -> None:
        for message in messages:
            self._stream.send(write_from_part(message))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(WITHIN_S)
        self._socket.close()


class Scripted:
    """A node's end whose other end is scripted."""

    def __init__(self, within_s: float = WITHIN_S) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self.part = ScriptedPart(theirs)
        self.events = MoverEvents()
        self.mover = RemoteMover(
            ours,
            "d0/1",
            LAYERS,
            LAYOUT,
            self.events.put,
            SystemClock(),
            stall_s=7.0,
            start_within_s=within_s,
            digest_within_s=within_s,
            stop_within_s=within_s,
        )

    def start(self, up: FromPart = UP) -> None:
        self.part.say(up)
        self.mover.start()
        assert self.part.next() == StartMover("d0/1", 7.0)

    def read(self, read_id: int, to_digest: Sequence[int] = ()) -> None:
        self.mover.read(read_id, "p", [ReadRange(0, 0, 2)], to_digest)
        self.part.next_of(ReadBlocks)

    def settle(self) -> None:
        """Wait until everything that the part has said so far is handled."""
        self.part.say(FillFailed(99, "settled"))
        assert self.events.next() == FillFailed(99, "settled")

    def close(self) -> None:
        self.part.close()
        if self.mover._thread.is_alive():
            self.mover._thread.join(WITHIN_S)
        self._socket.close()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    made = Scripted()
    made.start()
    yield made
    made.close()


@pytest.fixture
def hasty() -> Iterator[Scripted]:
    """An end that waits for nothing for long, and is not started."""
    made = Scripted(within_s=0.01)
    yield made
    made.close()


# The node's end


def test_the_memory_of_a_part_is_published_under_the_name_of_its_agent(scripted: Scripted) -> None:
    block_bytes = LAYOUT.part(LAYERS).block_bytes
    memory = PeerMemory(
        "d0/1", b"agent", 4096, NUM_BLOCKS, block_bytes, "DRAM", 0, NUM_PROBE_BLOCKS, LAYOUT.block_size, LAYERS
    )
    assert scripted.mover.published("d0/1") == memory
    assert scripted.mover.published("other").incarnation == "other"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (MoverNotUp("no such device"), "no such device"),
        (MoverUp(b"agent", 4096, 16, 2, "DRAM", 0, range(2)), "holds the layers"),
        (MoverUp(b"agent", 4096, 16, 2, "DRAM", 0, None), "holds the layers"),
        (MoverUp(b"agent", 0, 16, 2, "DRAM", 0, LAYERS), "base address"),
        (MoverUp(b"agent", (1 << 64) - 1, 16, 2, "DRAM", 0, LAYERS), "end of the memory"),
        (MoverUp(b"agent", 4096, 0, 2, "DRAM", 0, LAYERS), "number of blocks"),
        (MoverUp(b"agent", 4096, 16, 1 << 20, "DRAM", 0, LAYERS), "probe blocks"),
        (MoverUp(b"agent", 4096, 16, 2, "DISK", 0, LAYERS), "unknown kind"),
        (MoverUp(b"", 4096, 16, 2, "DRAM", 0, LAYERS), "agent metadata"),
    ],
)
def test_an_agent_that_can_not_be_used_is_refused_when_it_starts(
    answer: FromPart, words: str, faults: queue.SimpleQueue[BackgroundFault]
) -> None:
    scripted = Scripted()
    scripted.part.say(answer)
    with pytest.raises(ConfigError, match=words):
        scripted.mover.start()
    scripted.mover.connect(PeerMemory("p", b"x", 1, 1, 1, "DRAM", 0))
    scripted.events.next_of(ConnectFailed)
    scripted.mover.stop()
    scripted.close()
    assert faults.empty()


def test_a_part_that_does_not_start_or_is_gone_is_no_wait_without_end(hasty: Scripted) -> None:
    with pytest.raises(EngineFault, match="made no transfer agent"):
        hasty.mover.start()
    gone = Scripted()
    gone.part.close()
    with pytest.raises(StreamEnded):
        gone.mover.start()
    gone.close()


def test_each_call_is_a_message_and_each_event_is_delivered(scripted: Scripted) -> None:
    peer = PeerMemory("p", b"x", 4096, 16, 512, "DRAM", 0, 2, 4, LAYERS)
    mover, part = scripted.mover, scripted.part
    mover.connect(peer)
    mover.fill(-3, 16, "seed", 1)
    mover.read(-3, "p", [ReadRange(16, 16, 1)], (16,), 1)
    mover.abandon(-3)
    mover.set_num_readers(4)
    said = [part.next() for _ in range(5)]
    assert said[:2] == [peer, FillBlock(-3, 16, "seed", 1)]
    assert isinstance(said[2], ReadBlocks)
    assert (said[2].ranges, list(said[2].to_digest)) == ([ReadRange(16, 16, 1)], [16])
    assert said[3:] == [CancelRead(-3), SetNumReaders(4)]
    part.say(Connected("p"), PeerNotConnected("q", TransferCause.PEER_GONE, "killed"))
    events: list[BlockFilled | BlocksDigested | ReadStalled | ReadDone] = [
        BlockFilled(-3, {1: 5, 4: 6}),
        BlocksDigested(-3, {16: 9}),
        ReadStalled(-3, "slow"),
        ReadDone(-3, 512, 0.5, 1.0, 1),
    ]
    part.say(*events)
    assert scripted.events.next() == Connected("p")
    failed = scripted.events.next_of(ConnectFailed)
    assert (failed.incarnation, failed.error.cause, failed.error.detail) == ("q", TransferCause.PEER_GONE, "killed")
    assert [scripted.events.next() for _ in events] == events
    figures = mover.figures
    assert (figures.bytes_arrived, figures.reads_in_flight, figures.arrived_at is not None) == (512, 0, True)


def test_a_read_id_in_use_is_refused_and_free_once_it_is_answered(scripted: Scripted) -> None:
    scripted.read(1)
    with pytest.raises(ValueError, match="read 1"):
        scripted.mover.read(1, "p", [ReadRange(0, 0, 1)])
    scripted.part.say(ReadFailed(1, TransferCause.PEER_GONE, ""))
    scripted.events.next_of(ReadFailed)
    scripted.read(1)
    assert scripted.mover.figures.reads_in_flight == 1


def test_answers_that_nobody_waits_for_are_counted_and_change_nothing(scripted: Scripted) -> None:
    scripted.read(1, to_digest=(0, 1))
    scripted.part.say(
        ReadDone(2, 1, 0.0, 0.0, 1),
        ReadStalled(2, ""),
        BlocksDigested(2, {0: 1}),
        BlocksDigested(1, {7: 1}),
        BlocksDigested(1, {0: 1, 7: 1}),
        BlocksDigested(1, {0: 2}),
        ReadDone(1, 1, 0.0, 0.0, 1),
        ReadDone(1, 1, 0.0, 0.0, 1),
        BlocksDigested(1, {1: 3}),
        BlocksDigested(1, {1: 3}),
        DigestsFailed(1, ""),
        DigestsFound(77, (1,)),
    )
    expected = [BlocksDigested(1, {0: 1}), ReadDone(1, 1, 0.0, 0.0, 1), BlocksDigested(1, {1: 3})]
    assert [scripted.events.next() for _ in expected] == expected
    scripted.settle()
    assert scripted.mover.counters == {
        "ReadDone_unknown": 2,
        "ReadStalled_unknown": 1,
        "BlocksDigested_unknown": 4,
        "DigestsFailed_unknown": 1,
        "digests_unknown": 1,
    }
    assert scripted.mover.figures.bytes_arrived == 1


def test_digests_that_failed_are_reported_once_also_after_the_read(scripted: Scripted) -> None:
    scripted.read(1, to_digest=(0, 1))
    scripted.part.say(ReadDone(1, 1, 0.0, 0.0, 1), DigestsFailed(1, "why"), BlocksDigested(1, {0: 1}))
    assert [scripted.events.next(), scripted.events.next()] == [ReadDone(1, 1, 0.0, 0.0, 1), DigestsFailed(1, "why")]
    scripted.settle()


@pytest.mark.parametrize(
    "message",
    [
        ReadDone(1, 1, float("nan"), 1.0, 1),
        ReadDone(1, 1, 0.0, float("inf"), 1),
        BlockFilled(1, {0: 1}),
        BlockFilled(1, {5: 1}),
        MoverStopped(),
        UP,
        MoverFault("ZeroDivisionError()"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_makes_no_sense_ends_the_node(
    scripted: Scripted, message: FromPart, faults: queue.SimpleQueue[BackgroundFault]
) -> None:
    scripted.read(1)
    scripted.part.say(message)
    fault = faults.get(timeout=WITHIN_S)
    assert isinstance(fault.__cause__, StreamLost | EngineFault)
    assert scripted.mover.fault is fault.__cause__
    assert scripted.mover.figures.reads_in_flight == 1, "it may still write"
    assert scripted.events.empty()
    scripted.mover.read(2, "p", [ReadRange(0, 0, 1)])
    scripted.events.next_of(ReadFailed)
    scripted.mover.stop()


def test_the_end_of_the_stream_ends_the_node(scripted: Scripted, faults: queue.SimpleQueue[BackgroundFault]) -> None:
    asked = scripted.mover.ask_digests([1])
    scripted.part.close()
    assert isinstance(faults.get(timeout=WITHIN_S).__cause__, StreamEnded)
    with pytest.raises(StreamEnded):
        asked()
    with pytest.raises(EngineFault, match="not running"):
        scripted.mover.ask_digests([1])


def test_an_event_that_can_not_be_delivered_ends_the_node(
    scripted: Scripted, faults: queue.SimpleQueue[BackgroundFault]
) -> None:
    def deliver(event: MoverEvent) -> None:
        raise ZeroDivisionError("listener")

    scripted.mover._deliver = deliver
    scripted.part.say(Connected("p"))
    assert isinstance(faults.get(timeout=WITHIN_S).__cause__, ZeroDivisionError)


def test_digests_come_from_the_part_or_an_error_does(scripted: Scripted) -> None:
    asked = scripted.mover.ask_digests([3, 4], Division(2, 1))
    question = scripted.part.next_of(DigestBlocks)
    assert (list(question.ids), question.parts, question.group) == ([3, 4], 2, 1)
    scripted.part.say(DigestsFound(question.question, (7, 8)))
    assert list(asked()) == [7, 8]
    for answer, words in (((1,), "1 digests, not 2"), (None, "no memory")):
        asked = scripted.mover.ask_digests([3, 4])
        question = scripted.part.next_of(DigestBlocks)
        number = question.question
        scripted.part.say(DigestsFound(number, answer) if answer else DigestsNotFound(number, "no memory"))
        with pytest.raises(EngineFault, match=words):
            asked()
    with pytest.raises(ValueError, match="all its layers"):
        scripted.mover.ask_digests([1], Division(1, 0, range(2, 3)))


def test_digests_of_parts_are_sums_and_asked_for_at_once(scripted: Scripted) -> None:
    def here(ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        # The other process is busy with them already.
        question = scripted.part.next_of(DigestBlocks)
        scripted.part.say(DigestsFound(question.question, (5, (1 << 64) - 1)))
        return [1, 2]

    assert list(digests_of_parts(here, lambda: [scripted.mover])([0, 1])) == [6, 1]


def test_digests_that_do_not_come_end_the_node(hasty: Scripted, faults: queue.SimpleQueue[BackgroundFault]) -> None:
    """The engine would wait as long for those of the next offer."""
    hasty.mover._start_within_s = WITHIN_S
    hasty.start()
    with pytest.raises(EngineFault, match=r"computed no digests within 0\.01 s"):
        hasty.mover.ask_digests([1])()
    fault = faults.get(timeout=WITHIN_S)
    assert "computed no digests" in str(fault)
    assert hasty.mover.fault is fault.__cause__
    with pytest.raises(EngineFault, match="not running"):
        hasty.mover.ask_digests([1])


def test_a_part_whose_turns_do_not_go_on_hangs_and_one_that_goes_on_or_sleeps_does_not(scripted: Scripted) -> None:
    async def watch(turns: Callable[[int], Turns] | None) -> None:
        def tell(message: ToPart) -> bool:
            assert isinstance(message, AskTurns)
            if turns is not None:
                scripted.mover._received(turns(message.question))
            return True

        scripted.mover._tell = tell  # type: ignore[method-assign]
        async with asyncio.timeout(1000):
            await scripted.mover.watch_turns()

    for hanging in (None, lambda n: Turns(n, 5, True, 1)):
        with pytest.raises(EngineFault, match="does not answer"):
            run_virtually(watch(hanging))
    for living in (lambda n: Turns(n, n, True, 1), lambda n: Turns(n, 5, False, 3)):
        with pytest.raises(TimeoutError):
            run_virtually(watch(living))
    assert scripted.mover.figures.stuck_reads == 3


def test_a_mover_that_is_stopped_leaves_the_stream_to_the_next(scripted: Scripted) -> None:
    stopper = threading.Thread(target=scripted.mover.stop)
    stopper.start()
    assert scripted.part.next() == StopMover()
    scripted.part.say(MoverStopped())
    stopper.join(WITHIN_S)
    scripted.mover.fill(1, 2, "seed")
    scripted.events.next_of(FillFailed)
    scripted.mover.stop()
    again = RemoteMover(scripted._socket, "d0.next/1", LAYERS, LAYOUT, scripted.events.put, SystemClock())
    scripted.part.say(UP)
    again.start()
    scripted.part.next_of(StartMover)
    scripted.part.say(Connected("p"))
    assert scripted.events.next() == Connected("p")
    scripted.part.close()
    again._thread.join(WITHIN_S)


def test_a_mover_that_does_not_stop_loses_its_stream(
    hasty: Scripted, faults: queue.SimpleQueue[BackgroundFault]
) -> None:
    hasty.mover._start_within_s = WITHIN_S
    hasty.start()
    hasty.mover.stop()
    hasty.part._thread.join(WITHIN_S)
    assert not hasty.part._thread.is_alive()
    assert faults.empty()


def test_values_that_no_message_holds_are_refused_and_end_nothing(scripted: Scripted) -> None:
    scripted.mover.connect(PeerMemory("p", b"x", 4096, "many", 1024, "DRAM", 0))  # type: ignore[arg-type]
    failed = scripted.events.next_of(ConnectFailed)
    assert failed.error.cause is TransferCause.REFUSED
    scripted.mover.read(1, "p", [ReadRange(-1, 0, 1)])
    answer = scripted.events.next_of(ReadFailed)
    assert (answer.cause, scripted.mover.figures.reads_in_flight) == (TransferCause.REFUSED, 0)


@pytest.mark.parametrize(
    "values",
    [
        {"agent_metadata": bytes((1 << 16) + 1)},
        {"incarnation": "p" * 200},
        {"num_blocks": 1 << 63},
        {"kind": "DISK"},
        {"layers": range(100)},
        {"block_bytes": 1},
    ],
    ids=lambda values: next(iter(values)),
)
def test_what_a_peer_published_is_checked_before_it_is_sent_on(
    scripted: Scripted, values: dict[str, Any], faults: queue.SimpleQueue[BackgroundFault]
) -> None:
    good = PeerMemory("p", b"x", 4096, 16, 512, "DRAM", 0, 2, 4, LAYERS)
    scripted.mover.connect(replace(good, **values))
    scripted.events.next_of(ConnectFailed)
    scripted.mover.connect(good)
    assert scripted.part.next() == good
    assert faults.empty()


def test_so_much_of_peers_that_it_is_not_read_in_time_is_refused_and_ends_nothing(
    faults: queue.SimpleQueue[BackgroundFault],
) -> None:
    ours, theirs = socket.socketpair()
    up, events = write_from_part(UP), queue.SimpleQueue[MoverEvent]()
    theirs.sendall(len(up).to_bytes(4, "big") + up)
    mover = RemoteMover(ours, "d0/1", LAYERS, LAYOUT, events.put, SystemClock(), stop_within_s=0.01)
    mover.start()
    peer = PeerMemory("p", bytes(1 << 16), 4096, 16, 512, "DRAM", 0, 2, 4, LAYERS)
    while events.empty():
        mover.connect(peer)
    failed = events.get()
    assert isinstance(failed, ConnectFailed)
    assert "does not read" in failed.error.detail
    assert (mover.fault, faults.empty()) == (None, True)
    mover.stop()
    ours.close()
    theirs.close()


# Both ends


class FailingBackend(FakeTransferBackend):
    """A backend whose polls may fail in a way that no backend's may."""

    fail = False

    def poll(self, handle: ReadHandle) -> ReadState:
        if self.fail:
            raise ZeroDivisionError("a fault of the backend")
        return super().poll(handle)


class Both:
    """A node's end, and the real end of a part in a thread, over the in-process fake."""

    def __init__(self, pair: tuple[socket.socket, socket.socket]) -> None:
        self.fabric = FakeTransferFabric()
        self.part_memory = new_part_memory(LAYERS)
        self.sender_memory = new_part_memory(LAYERS)
        for block in range(NUM_BLOCKS + NUM_PROBE_BLOCKS):
            size = self.sender_memory.block_bytes
            ctypes.memset(self.sender_memory.base_address + block * size, block + 1, size)
        sender = FakeTransferBackend(self.fabric, "p/1", self.sender_memory)
        self.peer = PeerMemory.of(self.sender_memory, "p/1", sender.agent_metadata())
        self.ours, self.theirs = pair
        self.backends: list[FailingBackend] = []
        self.server = MoverServer(self.theirs, self.part_memory, self._make_backend)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.error: BaseException | None = None
        self.thread.start()
        self.events = MoverEvents()

    def _serve(self) -> None:
        try:
            self.server.serve()
        except BaseException as error:
            self.error = error
        finally:
            self.theirs.close()

    def _make_backend(self, agent: str, memory: KVMemory) -> TransferBackend:
        if agent == "bad":
            raise ConfigError("no such device")
        self.backends.append(FailingBackend(self.fabric, agent, memory))
        return self.backends[-1]

    def mover(self, agent: str = "d0/1") -> RemoteMover:
        return RemoteMover(self.ours, agent, LAYERS, LAYOUT, self.events.put, SystemClock())

    def started(self, agent: str = "d0/1", connect: bool = True) -> RemoteMover:
        mover = self.mover(agent)
        mover.start()
        if connect:
            mover.connect(self.peer)
            assert self.events.next() == Connected("p/1")
        return mover

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.ours.shutdown(socket.SHUT_RDWR)
        self.thread.join(WITHIN_S)
        assert not self.thread.is_alive()
        self.ours.close()


def new_part_memory(layers: range) -> KVMemory:
    block_bytes = LAYOUT.part(layers).block_bytes
    buffer = (ctypes.c_char * ((NUM_BLOCKS + NUM_PROBE_BLOCKS) * block_bytes))()
    where = (ctypes.addressof(buffer), NUM_BLOCKS, block_bytes, "DRAM", 0, buffer)
    return KVMemory(*where, num_probe_blocks=NUM_PROBE_BLOCKS, layout=LAYOUT, layers=layers)


@pytest.fixture(params=["plain", "tls"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Both]:
    made = Both(tls_pair(tmp_path) if request.param == "tls" else socket.socketpair())
    yield made
    made.close()


def test_a_part_reads_fills_and_digests_for_its_node(both: Both) -> None:
    mover = both.mover()
    mover.start()
    assert mover.published("d0/1") == PeerMemory.of(both.part_memory, "d0/1", b"memory:d0/1")
    mover.connect(both.peer)
    assert both.events.next() == Connected("p/1")
    mover.fill(-1, NUM_BLOCKS, "seed")
    filled = both.events.next_of(BlockFilled)
    theirs, ours = block_digests(both.sender_memory), block_digests(both.part_memory)
    assert [filled.digests[1]] == ours([NUM_BLOCKS])
    mover.read(1, "p/1", [ReadRange(4, 7, 2), ReadRange(0, 0, 1)], (4, 5))
    events = [both.events.next(), both.events.next()]
    assert BlocksDigested(1, dict(zip((4, 5), theirs([7, 8]), strict=True))) in events
    (done,) = (event for event in events if isinstance(event, ReadDone))
    assert (done.read_id, done.num_bytes) == (1, 3 * both.part_memory.block_bytes)
    assert mover.ask_digests([4, 5, 0])() == tuple(theirs([7, 8, 0])) == tuple(ours([4, 5, 0]))
    for wrong in ([NUM_BLOCKS + NUM_PROBE_BLOCKS], [1 << 50]):
        with pytest.raises(EngineFault, match="are not all in"):
            mover.ask_digests(wrong)()
    for division in (Division(0), Division(5), Division(1, 1)):
        with pytest.raises(EngineFault, match="parts of group"):
            mover.ask_digests([0], division)()
    mover.disconnect("p/1")
    mover.read(2, "p/1", [ReadRange(0, 0, 1)])
    both.events.next_of(ReadFailed)
    mover.stop()


def test_a_part_serves_one_agent_after_the_other(both: Both) -> None:
    with pytest.raises(ConfigError, match="no such device"):
        both.mover("bad").start()
    for agent in ("d0.first/1", "d0.next/1"):
        mover = both.started(agent)
        mover.read(1, "p/1", [ReadRange(0, 3, 1)])
        both.events.next_of(ReadDone)
        mover.stop()
    assert [both.fabric.find(name).alive for name in ("d0.first/1", "d0.next/1")] == [False, False]  # type: ignore[union-attr]


def test_a_mover_that_was_stopped_says_nothing_to_the_next_node(both: Both) -> None:
    """Its thread may still be in a call into the agent, and ids of sub-reads begin anew with every mover of a node."""
    first = both.started("d0.first/1", connect=False)
    stopped = both.server._mover
    assert stopped is not None
    first.stop()
    mover = both.started("d0.next/1")
    stopped._deliver(FillFailed(1, "of the first"))
    mover.fill(1, NUM_BLOCKS, "seed")
    both.events.next_of(BlockFilled)
    assert both.server.counters == {"FillFailed_late": 1}
    mover.stop()


def test_an_agent_that_hangs_does_not_hold_up_the_end_of_a_part() -> None:
    ours, theirs = socket.socketpair()
    is_called, release = threading.Event(), threading.Event()

    def make_backend(agent: str, memory: KVMemory) -> TransferBackend:
        is_called.set()
        release.wait(WITHIN_S)
        raise ConfigError("too late")

    server = MoverServer(theirs, new_part_memory(LAYERS), make_backend, stop_within_s=0.01)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    frame = write_to_part(StartMover("d0/1", 1.0))
    ours.sendall(len(frame).to_bytes(4, "big") + frame)
    assert is_called.wait(WITHIN_S)
    ours.close()
    thread.join(WITHIN_S / 2)
    assert not thread.is_alive()
    release.set()
    assert server._worker.join(WITHIN_S)
    theirs.close()


def test_a_fault_of_the_mover_there_ends_the_node_here(both: Both, faults: queue.SimpleQueue[BackgroundFault]) -> None:
    mover = both.started()
    both.backends[0].fail = True
    mover.read(1, "p/1", [ReadRange(0, 0, 1)])
    fault = faults.get(timeout=WITHIN_S)
    assert "a fault of the backend" in str(fault)
    assert mover.fault is fault.__cause__
    assert mover.figures.reads_in_flight == 1
    both.thread.join(WITHIN_S)
    assert not both.thread.is_alive(), "its process ends with the node"


def test_the_end_of_the_node_stops_the_mover_there(both: Both) -> None:
    both.started(connect=False)
    both.ours.shutdown(socket.SHUT_RDWR)
    both.thread.join(WITHIN_S)
    assert both.error is None
    agent = both.fabric.find("d0/1")
    assert agent is not None
    assert not agent.alive


@pytest.mark.parametrize(
    "message",
    [
        FillBlock(1, NUM_BLOCKS + NUM_PROBE_BLOCKS, "seed", 0),
        FillBlock(1, NUM_BLOCKS, "seed", 1),
        ReadBlocks(1, "p/1", [1, 2], [1], [1], [0], [], 1),
        ReadBlocks(1, "p/1", [1], [1], [1], [1], [], 1),
        ReadBlocks(1, "p/1", [1], [1], [1], [0], [], 1 << 30),
        ReadBlocks(1, "p/1", [1], [1], [1], [0], [], 0),
    ],
)
def test_a_part_ends_when_it_is_told_what_makes_no_sense(both: Both, message: ToPart) -> None:
    mover = both.started(connect=False)
    mover._stream.send(write_to_part(message))
    both.thread.join(WITHIN_S)
    assert isinstance(both.error, StreamLost)


def test_calls_before_the_start_are_counted(both: Both) -> None:
    stream = MessageStream(both.ours)
    stream.send(write_to_part(CancelRead(1)))
    stream.leave()
    stream.run(lambda frame: None)
    mover = both.started(connect=False)
    assert both.server.counters == {"CancelRead_unknown": 1}
    mover.stop()

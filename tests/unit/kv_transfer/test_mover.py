"""The mover over the in-process fake: the order of reads, their answers, and which reads may still write.

Faults of the transport are met by a mover alone, and by a node's mover of parts that has it as its only part. What all
movers have in common, as a node uses them, is in tests/contract/test_parts_movers.py.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import xxhash

from baton.clock import Clock, SystemClock
from baton.engine.runner import KVMemory
from baton.errors import BackgroundFault, ConfigError, EngineFault, TransferCause
from baton.runner.blocks.block_digests import block_digests
from baton.runner.blocks.digest_definition import BlockDigests
from baton.runner.blocks.known_bytes import FillBlock, known_bytes
from baton.runner.blocks.sub_blocks import WHOLE, Division
from kv_transfer.backends.base import BadRange, PeerGone, PeerMemory, ReadHandle, ReadState, ReadStuck
from kv_transfer.layout import PeerNode
from kv_transfer.mover.agent_reads import LONGEST_PAUSE_S, READER_PUMP_S, SHORTEST_PAUSE_S, STUCK_AFTER_S, pause
from kv_transfer.mover.mover import STOP_WITHIN_S, Mover
from kv_transfer.mover.part_mover import (
    BlockFilled,
    BlocksDigested,
    Connected,
    ConnectFailed,
    DeliverEvent,
    DigestsFailed,
    FillFailed,
    MoverEvent,
    ReadDone,
    ReadFailed,
    ReadStalled,
)
from kv_transfer.mover.parts_mover import OwnPart, PartsMover
from kv_transfer.mover.pieces import MAX_PROBE_INTERVAL_S, WindowLimits
from kv_transfer.piece_plan import ReadRange
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_mover import FakeMover
from tests.doubles.fake_transfer_backend import FakeTransferBackend, FakeTransferFabric
from tests.doubles.faulty_transfer_backend import Faults, FaultyTransferBackend
from tests.support.mover_events import MoverEvents
from tests.support.transfer_sender import fill, new_memory, pattern
from tests.support.virtual_time import run_virtually

NUM_BLOCKS = 64
BLOCK_BYTES = 256
WITHIN_S = 20.0
SMALL = WindowLimits(bytes_in_flight=8 * BLOCK_BYTES, posts_in_flight=2, piece_bytes=4 * BLOCK_BYTES)


class WatchedBackend(FakeTransferBackend):
    """Counts the mover's calls, notes the order of its posts, and can fail a read as a broken transport would."""

    calls = 0
    pumped: threading.Event | None = None
    break_reads = False
    refuse_posts = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.posted: list[tuple[ReadRange, ...]] = []
        self.broken: set[ReadHandle] = set()
        self.closed = False

    def post_read(self, incarnation: str, ranges: Sequence[ReadRange]) -> ReadHandle:
        if self.refuse_posts:
            self.refuse_posts -= 1
            raise BadRange("not to the transport's taste")
        self.posted.append(tuple(ranges))
        return super().post_read(incarnation, ranges)

    def poll(self, handle: ReadHandle) -> ReadState:
        self.calls += 1
        state = super().poll(handle)
        if self.break_reads:
            self.broken.add(handle)
        if handle not in self.broken:
            return state
        raise ReadStuck("broken") if self.fabric_has("sender") else PeerGone("killed")

    def fabric_has(self, name: str) -> bool:
        agent = self._fabric.find(name)
        return agent is not None and agent.alive

    def pump(self) -> None:
        self.calls += 1
        super().pump()
        if self.pumped is not None:
            self.pumped.set()

    def close(self) -> None:
        super().close()
        self.closed = True


class OnlyPart(PartsMover):
    """A node's mover of parts with one part, whose peers have one part each."""

    def __init__(self, make_mover: Callable[[DeliverEvent], Mover], deliver: DeliverEvent) -> None:
        super().__init__(None, [OwnPart(range(1), make_mover)], deliver)

    def connect(self, peer: PeerMemory | PeerNode) -> None:
        super().connect(PeerNode.of(peer) if isinstance(peer, PeerMemory) else peer)


class Bench:
    """A mover, alone or as a node's only part, the fabric it reads over, and its events."""

    def __init__(
        self,
        faults: Faults | None = None,
        clock: Clock | None = None,
        deliver: DeliverEvent | None = None,
        digests: BlockDigests | None = None,
        in_parts: bool = False,
    ) -> None:
        self.fabric = FakeTransferFabric()
        self.local, _ = new_memory(NUM_BLOCKS, BLOCK_BYTES)
        self.events = MoverEvents()
        self.backend = WatchedBackend(self.fabric, "receiver", self.local)
        self.faulty = FaultyTransferBackend(self.backend, faults)
        backend = self.faulty if faults else self.backend

        def make(deliver: DeliverEvent) -> Mover:
            return Mover(lambda: backend, deliver, clock or SystemClock(), SMALL, digests)

        deliver = deliver or self.events.put
        self.mover: Mover | OnlyPart = OnlyPart(make, deliver) if in_parts else make(deliver)

    def add_sender(self, name: str) -> PeerMemory:
        memory, buffer = new_memory(NUM_BLOCKS, BLOCK_BYTES)
        fill(buffer, memory, salt=1)
        backend = FakeTransferBackend(self.fabric, name, memory)
        return PeerMemory.of(memory, name, backend.agent_metadata())

    def attach(self, name: str = "sender") -> PeerMemory:
        peer = self.add_sender(name)
        self.round_trip(peer)
        return peer

    def round_trip(self, peer: PeerMemory) -> None:
        """Wait until the mover has executed all earlier commands."""
        self.mover.connect(peer)
        assert self.events.next() == Connected(peer.incarnation)

    def hold(self, read_id: int, num_blocks: int, name: str = "sender", posts: int = 1) -> None:
        """Read so many blocks of a sender that does not answer."""
        self.fabric.freeze(name)
        before = len(self.backend.posted)
        self.mover.read(read_id, name, [ReadRange(0, 0, num_blocks)])
        wait_until(lambda: len(self.backend.posted) == before + posts)

    def block(self, index: int) -> bytes:
        return ctypes.string_at(self.local.base_address + index * BLOCK_BYTES, BLOCK_BYTES)


@pytest.fixture(autouse=True)
def watched(faults: queue.SimpleQueue[BackgroundFault]) -> None:
    """Faults end no process here."""


@pytest.fixture
def start() -> Iterator[Callable[..., Bench]]:
    """Makes benches with running movers."""
    made: list[Bench] = []

    def make(*args: Any, **kwargs: Any) -> Bench:
        made.append(Bench(*args, **kwargs))
        made[-1].mover.start()
        return made[-1]

    yield make
    for bench in made:
        for name in ("sender", "stopped"):
            if bench.fabric.find(name):
                bench.fabric.thaw(name)
        bench.mover.stop()


@pytest.fixture(params=[False, True], ids=["alone", "in-parts"])
def in_parts(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def bench(start: Callable[..., Bench]) -> Bench:
    return start()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = SystemClock().monotonic() + WITHIN_S
    while not condition():
        assert SystemClock().monotonic() < deadline, "nothing happened"


# When it looks


def test_the_pause_grows_while_nothing_arrives_and_is_endless_without_work() -> None:
    assert pause(None, 0) is None
    assert pause(None, 3) == READER_PUMP_S
    assert pause(0.0, 0) == SHORTEST_PAUSE_S
    assert pause(0.05, 0) == pytest.approx(0.0005)
    assert pause(3600.0, 0) == pause(3600.0, 5) == LONGEST_PAUSE_S


def test_an_idle_mover_leaves_its_agent_alone(bench: Bench) -> None:
    peer = bench.attach()
    bench.mover.read(1, "sender", [ReadRange(0, 0, 20)])
    bench.events.next_of(ReadDone)
    bench.round_trip(peer)
    before = bench.backend.calls
    for _ in range(5):
        bench.round_trip(peer)
    assert bench.backend.calls == before > 0


def test_the_mover_pumps_exactly_while_a_lease_is_open(bench: Bench) -> None:
    peer = bench.attach()
    assert bench.backend.calls == 0
    pumped = bench.backend.pumped = threading.Event()
    bench.mover.set_num_readers(2)
    for _ in range(3):
        assert pumped.wait(WITHIN_S)
        pumped.clear()
    bench.mover.set_num_readers(0)
    bench.round_trip(peer)
    before = bench.backend.calls
    for _ in range(5):
        bench.round_trip(peer)
    assert bench.backend.calls == before


# Reads


def test_a_read_is_answered_with_its_bytes_times_and_ranges(bench: Bench) -> None:
    bench.attach()
    bench.mover.read(7, "sender", [ReadRange(0, 9, 3), ReadRange(10, 3, 4)])
    done = bench.events.next_of(ReadDone)
    assert (done.read_id, done.num_bytes, done.num_descriptors) == (7, 7 * BLOCK_BYTES, 3)
    assert 0 <= done.post_s <= done.total_s
    assert [bench.block(i) for i in (0, 2, 10, 13)] == [pattern(i, 1, BLOCK_BYTES) for i in (9, 11, 3, 6)]
    assert bench.backend.posted == [(ReadRange(0, 9, 3), ReadRange(10, 3, 1)), (ReadRange(11, 4, 3),)]
    assert (bench.mover.figures.reads_in_flight, bench.mover.figures.stuck_reads) == (0, 0)


def test_a_short_read_does_not_wait_for_a_long_one(bench: Bench) -> None:
    bench.attach()
    bench.hold(1, 60, posts=2)
    bench.mover.read(2, "sender", [ReadRange(60, 0, 1)])
    bench.fabric.thaw("sender")
    assert [bench.events.next_of(ReadDone).read_id for _ in range(2)] == [2, 1]


def test_ranges_that_do_not_fit_are_refused_as_a_whole(bench: Bench) -> None:
    bench.attach()
    bench.mover.read(1, "sender", [ReadRange(0, 0, 4), ReadRange(8, 0, 4), ReadRange(4, NUM_BLOCKS, 1)])
    assert bench.events.failure() == (1, TransferCause.REFUSED)
    assert bench.backend.posted == []


def test_a_refused_post_fails_its_read_and_holds_up_no_other(start: Callable[..., Bench], in_parts: bool) -> None:
    bench = start(in_parts=in_parts)
    peer = bench.attach()
    bench.backend.refuse_posts = 1
    bench.mover.read(1, "sender", [ReadRange(0, 0, 8)])
    assert bench.events.failure() == (1, TransferCause.REFUSED)
    bench.hold(2, 8, posts=2)
    bench.backend.refuse_posts = 1
    for read_id in (3, 4):
        bench.mover.read(read_id, "sender", [ReadRange(10 * read_id, 0, 1)])
    bench.round_trip(peer)
    bench.fabric.thaw("sender")
    assert bench.events.answers(3) == {2: ReadDone, 3: ReadFailed, 4: ReadDone}


def test_a_read_id_in_use_is_refused_and_free_again_afterwards(bench: Bench) -> None:
    bench.attach()
    bench.hold(1, 1)
    with pytest.raises(ValueError, match="read 1"):
        bench.mover.read(1, "sender", [ReadRange(1, 1, 1)])
    bench.fabric.thaw("sender")
    bench.events.next_of(ReadDone)
    bench.mover.read(1, "sender", [ReadRange(1, 1, 1)])
    bench.events.next_of(ReadDone)


def test_cancel_posts_no_more_and_waits_for_what_is_in_flight(bench: Bench) -> None:
    peer = bench.attach()
    bench.hold(1, 60, posts=2)
    bench.mover.read(2, "sender", [ReadRange(60, 0, 1)])
    bench.mover.abandon(1)
    bench.round_trip(peer)
    assert bench.mover.figures.reads_in_flight >= 1
    bench.fabric.thaw("sender")
    assert bench.events.answers(2) == {1: ReadFailed, 2: ReadDone}
    assert len(bench.backend.posted) <= 3


# Peers


def test_a_block_is_filled_before_a_later_read_is_posted(bench: Bench) -> None:
    peer = bench.attach()
    bench.mover.fill(-2, 3, "seed")
    bench.mover.read(-2, peer.incarnation, [ReadRange(4, 5, 1)])
    digest = xxhash.xxh3_64_intdigest(known_bytes("seed", BLOCK_BYTES))
    assert bench.events.next() == BlockFilled(-2, {1: digest})
    assert block_digests(bench.local)([3]) == [digest]
    bench.events.next_of(ReadDone)
    assert known_bytes("seed", BLOCK_BYTES) == known_bytes("seed", BLOCK_BYTES) != known_bytes("other", BLOCK_BYTES)


def test_a_block_that_cant_be_filled_ends_no_mover(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_filler(memory: KVMemory) -> FillBlock:
        raise ConfigError("no way to this memory")

    monkeypatch.setattr("kv_transfer.mover.agent_reads.block_filler", no_filler)
    bench.mover.fill(-2, 3, "seed")
    failed = bench.events.next_of(FillFailed)
    assert "no way to this memory" in failed.detail
    bench.attach()
    bench.mover.stop()
    bench.mover.fill(-3, 3, "seed")
    bench.events.next_of(FillFailed)


def test_a_peer_whose_memory_does_not_fit_or_has_changed_is_not_connected(bench: Bench) -> None:
    peer = bench.add_sender("sender")
    bench.mover.connect(dataclasses.replace(peer, block_bytes=1))
    assert bench.events.next_of(ConnectFailed).error.cause is TransferCause.LAYOUT_MISMATCH
    for _ in range(2):
        bench.round_trip(peer)
    bench.mover.connect(dataclasses.replace(peer, num_blocks=1))
    assert bench.events.next_of(ConnectFailed).error.cause is TransferCause.REFUSED


def test_an_unknown_peer_is_gone(bench: Bench) -> None:
    bench.mover.read(1, "nobody", [ReadRange(0, 0, 1)])
    assert bench.events.failure() == (1, TransferCause.PEER_GONE)
    bench.mover.disconnect("nobody")
    bench.mover.abandon(1)


def test_a_backend_that_breaks_on_a_peer_does_not_end_the_mover(bench: Bench) -> None:
    peer = bench.add_sender("sender")
    bench.mover.connect(dataclasses.replace(peer, num_blocks="many"))  # type: ignore[arg-type]
    event = bench.events.next_of(ConnectFailed)
    assert event.error.cause is TransferCause.REFUSED
    bench.round_trip(peer)


def test_a_killed_peer_fails_its_reads_and_no_others(bench: Bench) -> None:
    bench.attach("doomed")
    bench.attach("other")
    bench.fabric.freeze("doomed")
    for read_id in range(3):
        bench.mover.read(read_id, "doomed", [ReadRange(20 * read_id, 0, 20)])
    wait_until(lambda: len(bench.backend.posted) == 2)
    bench.fabric.kill("doomed")
    assert dict(bench.events.failure() for _ in range(3)) == dict.fromkeys(range(3), TransferCause.PEER_GONE)
    bench.mover.read(3, "doomed", [ReadRange(0, 0, 1)])
    assert bench.events.failure() == (3, TransferCause.PEER_GONE)
    bench.mover.read(4, "other", [ReadRange(0, 0, 1)])
    bench.events.next_of(ReadDone)
    assert bench.mover.figures.reads_in_flight == 0


def test_disconnect_waits_for_reads_in_flight_and_connect_cancels_it(bench: Bench) -> None:
    peer = bench.attach()
    bench.hold(1, 8, posts=2)
    bench.mover.read(2, "sender", [ReadRange(8, 8, 1)])
    bench.mover.disconnect("sender")
    assert bench.events.failure() == (2, TransferCause.CANCELLED)
    bench.mover.read(3, "sender", [ReadRange(9, 9, 1)])
    assert bench.events.failure() == (3, TransferCause.CANCELLED)
    assert bench.mover.figures.reads_in_flight == 1
    bench.round_trip(peer)
    bench.mover.read(4, "sender", [ReadRange(9, 9, 1)])
    bench.fabric.thaw("sender")
    assert [bench.events.next_of(ReadDone).read_id for _ in range(2)] == [1, 4]
    bench.mover.disconnect("sender")
    bench.mover.read(5, "sender", [ReadRange(9, 9, 1)])
    assert bench.events.failure() == (5, TransferCause.PEER_GONE)
    bench.round_trip(peer)


class StuckBench(Bench):
    """A read that failed and may still write, of a peer that lives. Its mover polls as often as it can."""

    def __init__(self) -> None:
        self.manual = FakeClock()
        super().__init__(clock=self.manual)
        self.mover.start()
        self.mover.set_num_readers(1)
        self.peer = self.attach()
        self.hold(1, 1)
        self.backend.break_reads = True
        assert self.events.next() == ReadStalled(1, "sender: KV transfer failed: peer_gone (broken)")
        wait_until(lambda: self.mover.figures.stuck_reads == 1)

    def probe(self) -> None:
        """Let the mover probe the peer once more."""
        num_posted = len(self.backend.posted)
        self.manual.advance(MAX_PROBE_INTERVAL_S)
        wait_until(lambda: len(self.backend.posted) > num_posted)


def test_a_read_that_may_still_write_is_not_answered_while_its_peer_lives() -> None:
    bench = StuckBench()
    bench.backend.break_reads = False
    bench.fabric.thaw("sender")
    bench.mover.connect(bench.peer)
    bench.events.next_of(ConnectFailed)
    for _ in range(3):
        bench.probe()
    assert bench.backend.posted[1:] == [(ReadRange(0, 0, 1),)] * 3
    assert bench.mover.figures.reads_in_flight == 1
    bench.mover.stop()
    assert bench.events.empty()
    assert (bench.mover.figures.reads_in_flight, bench.mover.figures.stuck_reads) == (1, 1)
    assert not bench.backend.closed


@pytest.mark.parametrize("probed", ["answers", "fails", "waits"])
def test_a_read_that_may_still_write_is_over_when_its_peer_is_gone(probed: str) -> None:
    bench = StuckBench()
    bench.backend.break_reads = probed == "fails"
    if probed == "answers":
        bench.fabric.thaw("sender")
    bench.probe()
    assert bench.events.empty()
    bench.backend.break_reads = False
    bench.fabric.kill("sender")
    bench.manual.advance(MAX_PROBE_INTERVAL_S)
    assert bench.events.failure() == (1, TransferCause.PEER_GONE)
    bench.mover.stop()
    assert (bench.mover.figures.reads_in_flight, bench.mover.figures.stuck_reads) == (0, 0)
    assert bench.backend.closed


# Faults of the transport


def test_a_disconnect_in_the_middle_fails_the_read_once(start: Callable[..., Bench], in_parts: bool) -> None:
    bench = start(Faults(disconnect=1.0), in_parts=in_parts)
    peer = bench.attach()
    bench.mover.read(1, "sender", [ReadRange(0, 0, 40)])
    assert bench.events.failure() == (1, TransferCause.PEER_GONE)
    bench.round_trip(peer)
    assert bench.events.empty()


def test_slow_reads_arrive_whole(start: Callable[..., Bench], in_parts: bool) -> None:
    bench = start(Faults(delay=1.0, slow=1.0, late=1.0, duplicate=1.0), in_parts=in_parts)
    bench.attach()
    bench.mover.read(1, "sender", [ReadRange(0, 0, 40)])
    bench.events.next_of(ReadDone)
    assert all(bench.block(i) == pattern(i, 1, BLOCK_BYTES) for i in range(40))
    assert bench.events.empty()


@pytest.mark.parametrize("damage", [Faults(drop=1.0), Faults(corrupt=1.0)])
def test_a_read_with_silent_damage_is_reported_done(
    start: Callable[..., Bench], in_parts: bool, damage: Faults
) -> None:
    bench = start(damage, in_parts=in_parts)
    bench.attach()
    bench.mover.read(1, "sender", [ReadRange(0, 0, 4)])
    bench.events.next_of(ReadDone)
    assert [bench.block(i) == pattern(i, 1, BLOCK_BYTES) for i in range(4)].count(False) == 1


def test_a_stalled_read_is_counted_and_writes_late(start: Callable[..., Bench], in_parts: bool) -> None:
    clock = FakeClock()
    bench = start(Faults(stall=1.0), clock, in_parts=in_parts)
    peer = bench.attach()
    bench.mover.read(1, "sender", [ReadRange(0, 0, 4)])
    bench.round_trip(peer)
    clock.advance(STUCK_AFTER_S)
    wait_until(lambda: bench.mover.figures.stuck_reads == 1)
    bench.mover.disconnect("sender")
    assert bench.block(3) == bytes(BLOCK_BYTES)
    bench.faulty.resume_stalled()
    bench.events.next_of(ReadDone)
    assert bench.block(3) == pattern(3, 1, BLOCK_BYTES)
    wait_until(lambda: bench.mover.figures.stuck_reads == 0)


def test_a_read_without_progress_is_stuck_after_a_while(start: Callable[..., Bench]) -> None:
    clock = FakeClock()
    bench = start(clock=clock)
    peer = bench.attach()
    bench.hold(1, 1)
    bench.round_trip(peer)
    assert bench.mover.figures.stuck_reads == 0
    clock.advance(STUCK_AFTER_S)
    wait_until(lambda: bench.mover.figures.stuck_reads == 1)
    bench.fabric.thaw("sender")
    assert bench.events.next_of(ReadDone).total_s == STUCK_AFTER_S


# Bytes that stop


class SlowBench(Bench):
    """A mover whose turns the test calls; each takes `turn_s`, and one block is in flight at a time."""

    def __init__(self, *senders: str, turn_s: float = 0.25) -> None:
        super().__init__()
        self.manual = FakeClock()
        self.turn_s = turn_s
        one_block = WindowLimits(bytes_in_flight=BLOCK_BYTES, posts_in_flight=1, piece_bytes=BLOCK_BYTES)
        self.mover = FakeMover(lambda: self.backend, self.events.put, self.manual, one_block, stall_s=10.0)
        self.mover.start()
        for name in senders:
            self.mover.connect(self.add_sender(name))
            self.turn()
            assert self.events.next() == Connected(name)

    def turn(self) -> None:
        assert isinstance(self.mover, FakeMover)
        self.manual.advance(self.turn_s)
        self.mover.turn()

    def pass_s(self, seconds: float) -> list[MoverEvent]:
        """The events that are delivered meanwhile."""
        for _ in range(int(seconds / self.turn_s)):
            self.turn()
        return self.events.left()


def test_a_read_of_which_nothing_arrives_is_reported_stalled_once_and_may_still_end() -> None:
    bench = SlowBench("sender", "other")
    bench.fabric.freeze("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 2)])
    bench.mover.read(2, "sender", [ReadRange(4, 4, 1)])
    bench.mover.read(3, "other", [ReadRange(8, 0, 1)])
    assert [type(event) for event in bench.pass_s(9.5)] == [ReadDone], "the other sender's"
    stalled = [
        ReadStalled(n, f"sender: nothing arrived for 10 s, {left} blocks are missing") for n, left in [(1, 2), (2, 1)]
    ]
    assert bench.pass_s(1000) == stalled
    assert (bench.mover.figures.reads_in_flight, bench.mover.figures.bytes_arrived) == (1, BLOCK_BYTES)
    bench.fabric.thaw("sender")
    assert {event.read_id for event in bench.pass_s(5) if isinstance(event, ReadDone)} == {1, 2}
    bench.mover.stop()


def test_a_read_that_is_queued_behind_others_which_make_progress_is_not_stalled() -> None:
    """A block takes six seconds, and each of twenty reads has to wait for those before it."""
    bench = SlowBench("sender")
    for read_id in range(1, 21):
        bench.mover.read(read_id, "sender", [ReadRange(2 * read_id, 0, 1)])
    said = []
    for _ in range(20):
        bench.fabric.freeze("sender")
        said += bench.pass_s(6)
        bench.fabric.thaw("sender")
        bench.turn()
    said += bench.pass_s(5)
    assert [type(event) for event in said] == [ReadDone] * 20
    bench.mover.stop()


def test_a_mover_that_was_held_up_reports_nothing_as_stalled() -> None:
    bench = SlowBench("sender")
    bench.fabric.freeze("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 1)])
    assert bench.pass_s(5) == []
    bench.manual.advance(1000)
    assert bench.pass_s(4) == []
    assert [type(event) for event in bench.pass_s(2)] == [ReadStalled]
    bench.fabric.thaw("sender")
    bench.pass_s(1)
    bench.mover.stop()


def test_a_call_into_the_agent_that_does_not_return_is_a_fault_and_an_idle_mover_is_none() -> None:
    class Hanging(SlowBench):
        """The transfer agent hangs in a call, during which time passes."""

        def poll_for_ever(self, handle: ReadHandle) -> ReadState:
            with pytest.raises(EngineFault, match="does not return"):
                run_virtually(self.mover.watch_turns())
            raise SystemExit

    async def watch_for_a_day(mover: Mover | PartsMover) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(86_400):
                await mover.watch_turns()

    bench = Hanging("sender")
    run_virtually(watch_for_a_day(bench.mover))
    bench.backend.poll = bench.poll_for_ever  # type: ignore[method-assign]
    bench.mover.read(1, "sender", [ReadRange(0, 0, 1)])
    with pytest.raises(SystemExit):
        bench.turn()


def test_each_command_is_a_turn_so_many_long_ones_are_no_hang() -> None:
    bench, seen = SlowBench(), list[tuple[int, bool]]()
    mover = bench.mover
    assert isinstance(mover, FakeMover)
    for _ in range(5):
        mover._enqueue(lambda: seen.append(mover.turns))
    bench.turn()
    numbers = [number for number, _ in seen]
    assert numbers == list(range(numbers[0], numbers[0] + 5))
    assert all(in_turn for _, in_turn in seen)
    bench.mover.stop()


# Digests


class ThreadNotingDigests:
    """Computes 1000 + n as the digest of block n, and notes in which thread."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.fail = False

    def __call__(self, block_ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        self.threads.append(threading.current_thread().name.split("_")[0])
        if self.fail:
            raise MemoryError("no digests today")
        return [1000 + block for block in block_ids]


@pytest.fixture
def digests() -> ThreadNotingDigests:
    return ThreadNotingDigests()


@pytest.fixture
def digesting(start: Callable[..., Bench], digests: ThreadNotingDigests) -> Bench:
    return start(digests=digests)


def test_a_mover_with_nothing_to_move_computes_digests_itself_after_read_done(
    digesting: Bench, digests: ThreadNotingDigests
) -> None:
    digesting.attach()
    digesting.mover.read(1, "sender", [ReadRange(3, 0, 2)], (3, 4))
    digesting.events.next_of(ReadDone)
    assert digesting.events.next() == BlocksDigested(1, {3: 1003, 4: 1004})
    assert digests.threads == ["baton-mover"]


def test_while_there_is_something_to_move_a_helper_computes_them(
    digesting: Bench, digests: ThreadNotingDigests
) -> None:
    digesting.attach("stopped")
    digesting.hold(1, 1, "stopped")
    digesting.attach()
    digesting.mover.read(2, "sender", [ReadRange(3, 0, 2)], (4,))
    said = [digesting.events.next(), digesting.events.next()]
    assert BlocksDigested(2, {4: 1004}) in said
    assert digests.threads == ["baton-digests"]


def test_every_block_of_a_long_read_that_is_wanted_is_digested_once(digesting: Bench) -> None:
    digesting.attach()
    wanted = [*range(0, 40, 3), 55]
    digesting.mover.read(1, "sender", [ReadRange(0, 0, 40), ReadRange(50, 50, 10)], wanted)
    found: list[int] = []
    done = False
    while not done or len(found) < len(wanted):
        event = digesting.events.next()
        done = done or isinstance(event, ReadDone)
        if isinstance(event, BlocksDigested):
            assert all(digest == 1000 + block for block, digest in event.digests.items())
            found += event.digests
    assert sorted(found) == wanted
    assert digesting.events.empty()


@pytest.mark.parametrize("parts", [1, 2])
def test_what_a_piece_brings_is_digested_in_one_call_for_each_group(
    digesting: Bench, digests: ThreadNotingDigests, parts: int
) -> None:
    """Ranges of groups take turns."""
    digesting.attach()
    ranges = [ReadRange(block, block, 1, number % 2) for number, block in enumerate(range(3, 11, 2))]
    wanted = [r.local_block * parts + part for r in ranges for part in range(parts)]
    digesting.mover.read(1, "sender", ranges, wanted, parts)
    digesting.events.next_of(ReadDone)
    first, second = (digesting.events.next_of(BlocksDigested) for _ in range(2))
    assert {*first.digests, *second.digests} == set(wanted)
    assert len(digests.threads) == 2


def test_digests_that_can_not_be_computed_are_reported_and_the_mover_goes_on(
    digesting: Bench, digests: ThreadNotingDigests
) -> None:
    digests.fail = True
    peer = digesting.attach()
    digesting.mover.read(1, "sender", [ReadRange(3, 0, 2)], (3, 4))
    digesting.events.next_of(ReadDone)
    assert digesting.events.next() == DigestsFailed(
        1, "the reader could not compute digests: MemoryError('no digests today')"
    )
    digesting.round_trip(peer)


def test_digests_that_are_not_wanted_are_not_computed(digesting: Bench, digests: ThreadNotingDigests) -> None:
    peer = digesting.attach()
    digesting.mover.read(1, "sender", [ReadRange(3, 0, 2)])
    digesting.events.next_of(ReadDone)
    digesting.round_trip(peer)
    assert digests.threads == []


# Beginning and end


def test_start_raises_what_the_agent_raised() -> None:
    def fail() -> FakeTransferBackend:
        raise ConfigError("no such device")

    mover = Mover(fail, lambda event: None, SystemClock())
    with pytest.raises(ConfigError, match="no such device"):
        mover.start()
    mover.stop()


def test_the_agent_lives_in_the_movers_thread(bench: Bench) -> None:
    made_in: list[str] = []

    def make() -> FakeTransferBackend:
        made_in.append(threading.current_thread().name)
        return FakeTransferBackend(bench.fabric, "another", bench.local)

    mover = Mover(make, lambda event: None, SystemClock())
    mover.start()
    assert made_in == ["baton-mover"]
    assert mover.agent_metadata == b"memory:another"
    mover.stop()


@pytest.mark.parametrize("of_digests", [False, True])
def test_an_event_that_can_not_be_delivered_ends_the_process(
    start: Callable[..., Bench], faults: queue.SimpleQueue[BackgroundFault], of_digests: bool
) -> None:
    """Somebody would wait for that event for ever. Digests are delivered by their own thread while a read is out."""

    def deliver(event: MoverEvent) -> None:
        if isinstance(event, BlocksDigested if of_digests else ReadFailed):
            raise ZeroDivisionError("listener")
        made.events.put(event)

    made = start(deliver=deliver, digests=ThreadNotingDigests())
    made.attach("stopped")
    made.hold(1, 1, "stopped")
    made.attach()
    made.mover.read(2, "sender" if of_digests else "nobody", [ReadRange(3, 0, 1)], (3,))
    assert isinstance(faults.get(timeout=WITHIN_S).__cause__, ZeroDivisionError)


def test_an_agent_that_can_not_be_pumped_ends_the_process(
    bench: Bench, faults: queue.SimpleQueue[BackgroundFault]
) -> None:
    def pump() -> None:
        raise OSError("a foreign error")

    bench.backend.pump = pump  # type: ignore[method-assign]
    bench.mover.set_num_readers(1)
    fault = faults.get(timeout=WITHIN_S)
    assert str(fault) == "background task mover failed: OSError('a foreign error')"
    assert bench.mover.fault is fault.__cause__


def test_a_read_that_can_not_be_released_fails_alone(bench: Bench) -> None:
    """The agent reports DONE and then fails to release the read: only what that read brought is in doubt."""
    bench.attach()
    release = bench.backend.release

    def fail_once(handle: ReadHandle) -> None:
        release(handle)
        bench.backend.release = release  # type: ignore[method-assign]
        raise RuntimeError("a foreign error")

    bench.backend.release = fail_once  # type: ignore[method-assign]
    bench.mover.read(1, "sender", [ReadRange(0, 0, 1)])
    assert bench.events.failure() == (1, TransferCause.REFUSED)
    bench.mover.read(2, "sender", [ReadRange(1, 0, 20)])
    bench.events.next_of(ReadDone)
    assert bench.mover.fault is None


def test_stop_answers_what_is_queued_and_everything_later(bench: Bench) -> None:
    peer = bench.attach()
    bench.hold(1, 8, posts=2)
    bench.mover.read(2, "sender", [ReadRange(8, 0, 8)])
    stopper = threading.Thread(target=bench.mover.stop)
    stopper.start()
    assert bench.events.failure() == (2, TransferCause.CANCELLED)
    bench.fabric.thaw("sender")
    bench.events.next_of(ReadDone)
    stopper.join(WITHIN_S)
    assert bench.backend.closed
    for _ in range(2):
        bench.mover.read(3, "sender", [ReadRange(0, 0, 1)])
        assert bench.events.failure() == (3, TransferCause.CANCELLED)
    bench.mover.connect(peer)
    bench.events.next_of(ConnectFailed)
    bench.mover.stop()


def test_stop_does_not_wait_for_ever_and_keeps_memory_that_may_be_written(start: Callable[..., Bench]) -> None:
    clock = FakeClock()
    bench = start(clock=clock)
    bench.attach()
    bench.hold(1, 1)
    bench.mover.read(2, "sender", [ReadRange(8, 0, 30)])
    wait_until(lambda: len(bench.backend.posted) == 2)
    stopper = threading.Thread(target=bench.mover.stop)
    stopper.start()
    while stopper.is_alive():
        clock.advance(STOP_WITHIN_S)
        stopper.join(0.001)
    assert bench.events.empty()
    assert (bench.mover.figures.reads_in_flight, bench.mover.fault) == (2, None)
    assert not bench.backend.closed


def test_a_fault_ends_the_thread_and_answers_only_what_can_be_answered(
    bench: Bench, faults: queue.SimpleQueue[BackgroundFault]
) -> None:
    def fail(handle: ReadHandle) -> ReadState:
        raise ZeroDivisionError("a fault of the backend")

    bench.attach()
    bench.hold(1, 8, posts=2)
    bench.mover.read(2, "sender", [ReadRange(8, 0, 8)])
    bench.backend.poll = fail  # type: ignore[method-assign]
    assert bench.events.failure() == (2, TransferCause.CANCELLED)
    wait_until(lambda: bench.mover.fault is not None)
    assert bench.mover.figures.reads_in_flight == 1
    assert isinstance(faults.get_nowait().__cause__, ZeroDivisionError)

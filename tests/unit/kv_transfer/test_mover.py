"""The mover over the in-process fake: the order of reads, their answers, and which reads may still write.

What a node uses is a mover of parts (`PartsMover`). With one part on either side it must be the mover itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import xxhash

from baton.background import BackgroundWatch, current_watch
from baton.clock import SystemClock
from baton.engine.runner import KVMemory
from baton.errors import BackgroundFault, ConfigError, EngineFault, TransferCause
from baton.runner.blocks.block_digests import block_digests
from baton.runner.blocks.known_bytes import FillBlock, known_bytes
from baton.runner.blocks.sub_blocks import WHOLE, Division
from kv_transfer.backends.base import BadRange, PeerGone, PeerMemory, ReadHandle, ReadState, ReadStuck
from kv_transfer.mover.mover import (
    STOP_WITHIN_S,
    STUCK_AFTER_S,
    Mover,
)
from kv_transfer.mover.mover_events import (
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
from kv_transfer.mover.pacing import LONGEST_PAUSE_S, READER_PUMP_S, SHORTEST_PAUSE_S, pause
from kv_transfer.mover.part_mover import DeliverEvent
from kv_transfer.mover.parts_mover import PartsMover
from kv_transfer.mover.stuck_reads import MAX_PROBE_INTERVAL_S
from kv_transfer.mover.window import WindowLimits
from kv_transfer.peer_node import PeerNode
from kv_transfer.piece_plan import ReadRange
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_mover import FakeMover
from tests.doubles.fake_transfer_backend import FakeTransferBackend, FakeTransferFabric
from tests.doubles.faulty_transfer_backend import Faults, FaultyTransferBackend
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


class Bench:
    """A mover, alone or as a node's only part, the fabric it reads over, and its events."""

    def __init__(self, faults: Faults | None = None, in_parts: bool = False) -> None:
        self.fabric = FakeTransferFabric()
        self.local, _ = new_memory(NUM_BLOCKS, BLOCK_BYTES)
        self.events: queue.SimpleQueue[MoverEvent] = queue.SimpleQueue()
        self.clock = SystemClock()
        self.backend = WatchedBackend(self.fabric, "receiver", self.local)
        self.faulty = FaultyTransferBackend(self.backend, faults)

        def make(deliver: DeliverEvent) -> Mover:
            return Mover(lambda: self.faulty if faults else self.backend, deliver, self.clock, SMALL)

        self.mover = PartsMover.of_one(None, make, self.events.put) if in_parts else make(self.events.put)

    def add_sender(self, name: str) -> PeerMemory:
        memory, buffer = new_memory(NUM_BLOCKS, BLOCK_BYTES)
        fill(buffer, memory, salt=1)
        backend = FakeTransferBackend(self.fabric, name, memory)
        return PeerMemory.of(memory, name, backend.agent_metadata())

    def connect(self, peer: PeerMemory) -> None:
        if isinstance(self.mover, PartsMover):
            self.mover.connect(PeerNode.of(peer))
        else:
            self.mover.connect(peer)

    def attach(self, name: str) -> PeerMemory:
        peer = self.add_sender(name)
        self.connect(peer)
        assert self.next() == Connected(name)
        return peer

    def next(self) -> MoverEvent:
        return self.events.get(timeout=WITHIN_S)

    def round_trip(self, peer: PeerMemory) -> None:
        """Wait until the mover has executed all earlier commands."""
        self.connect(peer)
        assert self.next() == Connected(peer.incarnation)

    def block(self, index: int) -> bytes:
        return ctypes.string_at(self.local.base_address + index * BLOCK_BYTES, BLOCK_BYTES)

    def assert_silent(self) -> None:
        assert self.events.empty()


@pytest.fixture(autouse=True)
def faults() -> Iterator[queue.SimpleQueue[BackgroundFault]]:
    """The faults that would end the process."""
    met: queue.SimpleQueue[BackgroundFault] = queue.SimpleQueue()
    token = current_watch.set(BackgroundWatch(met.put))
    yield met
    current_watch.reset(token)


@pytest.fixture(params=[False, True], ids=["alone", "in-parts"])
def in_parts(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def bench(in_parts: bool) -> Iterator[Bench]:
    made = Bench(in_parts=in_parts)
    made.mover.start()
    yield made
    made.mover.stop()


@pytest.fixture
def faulty(in_parts: bool) -> Iterator[Callable[[Faults], Bench]]:
    made: list[Bench] = []

    def make(faults: Faults) -> Bench:
        made.append(Bench(faults, in_parts))
        made[-1].mover.start()
        return made[-1]

    yield make
    for each in made:
        each.mover.stop()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = SystemClock().monotonic() + WITHIN_S
    while not condition():
        assert SystemClock().monotonic() < deadline, "nothing happened"


def failure(event: MoverEvent) -> tuple[int, TransferCause]:
    assert isinstance(event, ReadFailed), event
    return event.read_id, event.cause


# When it looks


def test_the_pause_grows_while_nothing_arrives_and_is_endless_without_work() -> None:
    assert pause(None, 0) is None
    assert pause(None, 3) == READER_PUMP_S
    assert pause(0.0, 0) == SHORTEST_PAUSE_S
    assert pause(0.05, 0) == pytest.approx(0.0005)
    assert pause(3600.0, 0) == pause(3600.0, 5) == LONGEST_PAUSE_S


def test_an_idle_mover_leaves_its_agent_alone(bench: Bench) -> None:
    peer = bench.attach("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 20)])
    assert isinstance(bench.next(), ReadDone)
    bench.round_trip(peer)
    before = bench.backend.calls
    for _ in range(5):
        bench.round_trip(peer)
    assert bench.backend.calls == before > 0


def test_the_mover_pumps_exactly_while_a_lease_is_open(bench: Bench) -> None:
    peer = bench.attach("sender")
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
    bench.attach("sender")
    bench.mover.read(7, "sender", [ReadRange(0, 9, 3), ReadRange(10, 3, 4)])
    done = bench.next()
    assert isinstance(done, ReadDone)
    assert (done.read_id, done.num_bytes, done.num_descriptors) == (7, 7 * BLOCK_BYTES, 3)
    assert 0 <= done.post_s <= done.total_s
    assert [bench.block(i) for i in (0, 2, 10, 13)] == [pattern(i, 1, BLOCK_BYTES) for i in (9, 11, 3, 6)]
    assert bench.backend.posted == [(ReadRange(0, 9, 3), ReadRange(10, 3, 1)), (ReadRange(11, 4, 3),)]
    assert (bench.mover.reads_in_flight, bench.mover.stuck_reads) == (0, 0)


def test_a_short_read_does_not_wait_for_a_long_one(bench: Bench) -> None:
    bench.attach("sender")
    bench.fabric.freeze("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 60)])
    wait_until(lambda: len(bench.backend.posted) == 2)
    bench.mover.read(2, "sender", [ReadRange(60, 0, 1)])
    bench.fabric.thaw("sender")
    done = [bench.next() for _ in range(2)]
    assert [d.read_id for d in done if isinstance(d, ReadDone)] == [2, 1]


def test_ranges_that_do_not_fit_are_refused_as_a_whole(bench: Bench) -> None:
    bench.attach("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 4), ReadRange(8, 0, 4), ReadRange(4, NUM_BLOCKS, 1)])
    assert failure(bench.next()) == (1, TransferCause.REFUSED)
    assert bench.backend.posted == []


def test_a_refused_post_fails_its_read_and_holds_up_no_other(bench: Bench) -> None:
    peer = bench.attach("sender")
    bench.backend.refuse_posts = 1
    bench.mover.read(1, "sender", [ReadRange(0, 0, 8)])
    assert failure(bench.next()) == (1, TransferCause.REFUSED)
    bench.fabric.freeze("sender")
    bench.mover.read(2, "sender", [ReadRange(0, 0, 8)])
    wait_until(lambda: len(bench.backend.posted) == 2)
    bench.backend.refuse_posts = 1
    for read_id in (3, 4):
        bench.mover.read(read_id, "sender", [ReadRange(10 * read_id, 0, 1)])
    bench.round_trip(peer)
    bench.fabric.thaw("sender")
    answers = {e.read_id: type(e) for e in (bench.next() for _ in range(3)) if isinstance(e, ReadDone | ReadFailed)}
    assert answers == {2: ReadDone, 3: ReadFailed, 4: ReadDone}


def test_an_unknown_peer_is_gone(bench: Bench) -> None:
    bench.mover.read(1, "nobody", [ReadRange(0, 0, 1)])
    assert failure(bench.next()) == (1, TransferCause.PEER_GONE)
    bench.mover.disconnect("nobody")
    bench.mover.cancel(1)


def test_a_read_id_in_use_is_refused_and_free_again_afterwards(bench: Bench) -> None:
    bench.attach("sender")
    bench.fabric.freeze("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 1)])
    with pytest.raises(ValueError, match="read 1"):
        bench.mover.read(1, "sender", [ReadRange(1, 1, 1)])
    bench.fabric.thaw("sender")
    assert isinstance(bench.next(), ReadDone)
    bench.mover.read(1, "sender", [ReadRange(1, 1, 1)])
    assert isinstance(bench.next(), ReadDone)


def test_cancel_posts_no_more_and_waits_for_what_is_in_flight(bench: Bench) -> None:
    peer = bench.attach("sender")
    bench.fabric.freeze("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 60)])
    bench.mover.read(2, "sender", [ReadRange(60, 0, 1)])
    wait_until(lambda: len(bench.backend.posted) == 2)
    bench.mover.cancel(1)
    bench.round_trip(peer)
    assert bench.mover.reads_in_flight >= 1
    bench.fabric.thaw("sender")
    answers = {e.read_id: type(e) for e in (bench.next(), bench.next()) if isinstance(e, ReadDone | ReadFailed)}
    assert answers == {1: ReadFailed, 2: ReadDone}
    assert len(bench.backend.posted) <= 3


# Peers


def test_a_block_is_filled_before_a_later_read_is_posted(bench: Bench) -> None:
    peer = bench.attach("sender")
    bench.mover.fill(-2, 3, "seed")
    bench.mover.read(-2, peer.incarnation, [ReadRange(4, 5, 1)])
    digest = xxhash.xxh3_64_intdigest(known_bytes("seed", BLOCK_BYTES))
    assert bench.next() == BlockFilled(-2, {1: digest})
    assert block_digests(bench.local)([3]) == [digest]
    assert isinstance(bench.next(), ReadDone)
    assert known_bytes("seed", BLOCK_BYTES) == known_bytes("seed", BLOCK_BYTES) != known_bytes("other", BLOCK_BYTES)


def test_a_block_that_cant_be_filled_ends_no_mover(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_filler(memory: KVMemory) -> FillBlock:
        raise ConfigError("no way to this memory")

    monkeypatch.setattr("kv_transfer.mover.mover.block_filler", no_filler)
    bench.mover.fill(-2, 3, "seed")
    failed = bench.next()
    assert isinstance(failed, FillFailed)
    assert "no way to this memory" in failed.detail
    bench.attach("sender")
    bench.mover.stop()
    bench.mover.fill(-3, 3, "seed")
    assert isinstance(bench.next(), FillFailed)


def test_a_connect_that_fails_is_answered_with_the_cause(bench: Bench) -> None:
    peer = bench.add_sender("sender")
    bench.connect(dataclasses.replace(peer, block_bytes=1))
    event = bench.next()
    assert isinstance(event, ConnectFailed)
    assert event.error.cause is TransferCause.LAYOUT_MISMATCH
    bench.connect(peer)
    bench.connect(peer)
    assert [bench.next(), bench.next()] == [Connected("sender")] * 2
    bench.connect(dataclasses.replace(peer, num_blocks=1))
    assert isinstance(bench.next(), ConnectFailed)


def test_a_backend_that_breaks_on_a_peer_does_not_end_the_mover(bench: Bench) -> None:
    peer = bench.add_sender("sender")
    bench.connect(dataclasses.replace(peer, num_blocks="many"))  # type: ignore[arg-type]
    event = bench.next()
    assert isinstance(event, ConnectFailed)
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
    assert sorted((failure(bench.next()) for _ in range(3)), key=lambda f: f[0]) == [
        (i, TransferCause.PEER_GONE) for i in range(3)
    ]
    bench.mover.read(3, "doomed", [ReadRange(0, 0, 1)])
    assert failure(bench.next()) == (3, TransferCause.PEER_GONE)
    bench.mover.read(4, "other", [ReadRange(0, 0, 1)])
    assert isinstance(bench.next(), ReadDone)
    assert bench.mover.reads_in_flight == 0


def test_disconnect_waits_for_reads_in_flight_and_connect_cancels_it(bench: Bench) -> None:
    peer = bench.attach("sender")
    bench.fabric.freeze("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 8)])
    wait_until(lambda: len(bench.backend.posted) == 2)
    bench.mover.read(2, "sender", [ReadRange(8, 8, 1)])
    bench.mover.disconnect("sender")
    assert failure(bench.next()) == (2, TransferCause.CANCELLED)
    bench.mover.read(3, "sender", [ReadRange(9, 9, 1)])
    assert failure(bench.next()) == (3, TransferCause.CANCELLED)
    assert bench.mover.reads_in_flight == 1
    bench.round_trip(peer)
    bench.mover.read(4, "sender", [ReadRange(9, 9, 1)])
    bench.fabric.thaw("sender")
    assert [e.read_id for e in (bench.next(), bench.next()) if isinstance(e, ReadDone)] == [1, 4]
    bench.mover.disconnect("sender")
    bench.mover.read(5, "sender", [ReadRange(9, 9, 1)])
    assert failure(bench.next()) == (5, TransferCause.PEER_GONE)
    bench.round_trip(peer)


class StuckBench(Bench):
    """A read that failed and may still write, of a peer that lives. Its mover polls as often as it can."""

    def __init__(self) -> None:
        super().__init__()
        self.manual = FakeClock()
        self.mover = Mover(lambda: self.backend, self.events.put, self.manual, SMALL)
        self.mover.start()
        self.mover.set_num_readers(1)
        self.peer = self.attach("sender")
        self.fabric.freeze("sender")
        self.mover.read(1, "sender", [ReadRange(0, 0, 1)])
        wait_until(lambda: len(self.backend.posted) == 1)
        self.backend.break_reads = True
        assert self.next() == ReadStalled(1, "sender: KV transfer failed: peer_gone (broken)")
        wait_until(lambda: self.mover.stuck_reads == 1)

    def probe(self) -> None:
        """Let the mover probe the peer once more."""
        num_posted = len(self.backend.posted)
        self.manual.advance(MAX_PROBE_INTERVAL_S)
        wait_until(lambda: len(self.backend.posted) > num_posted)


def test_a_read_that_may_still_write_is_not_answered_while_its_peer_lives() -> None:
    bench = StuckBench()
    bench.backend.break_reads = False
    bench.fabric.thaw("sender")
    bench.connect(bench.peer)
    assert isinstance(bench.next(), ConnectFailed)
    for _ in range(3):
        bench.probe()
    assert bench.backend.posted[1:] == [(ReadRange(0, 0, 1),)] * 3
    assert bench.mover.reads_in_flight == 1
    bench.mover.stop()
    bench.assert_silent()
    assert (bench.mover.reads_in_flight, bench.mover.stuck_reads) == (1, 1)
    assert not bench.backend.closed


@pytest.mark.parametrize("probed", ["answers", "fails", "waits"])
def test_a_read_that_may_still_write_is_over_when_its_peer_is_gone(probed: str) -> None:
    bench = StuckBench()
    bench.backend.break_reads = probed == "fails"
    if probed == "answers":
        bench.fabric.thaw("sender")
    bench.probe()
    bench.assert_silent()
    bench.backend.break_reads = False
    bench.fabric.kill("sender")
    bench.manual.advance(MAX_PROBE_INTERVAL_S)
    assert failure(bench.next()) == (1, TransferCause.PEER_GONE)
    bench.mover.stop()
    assert (bench.mover.reads_in_flight, bench.mover.stuck_reads) == (0, 0)
    assert bench.backend.closed


# Faults of the transport


def test_a_disconnect_in_the_middle_fails_the_read_once(faulty: Callable[[Faults], Bench]) -> None:
    bench = faulty(Faults(disconnect=1.0))
    peer = bench.attach("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 40)])
    assert failure(bench.next()) == (1, TransferCause.PEER_GONE)
    bench.round_trip(peer)
    bench.assert_silent()


def test_slow_reads_arrive_whole(faulty: Callable[[Faults], Bench]) -> None:
    bench = faulty(Faults(delay=1.0, slow=1.0, late=1.0, duplicate=1.0))
    bench.attach("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 40)])
    assert isinstance(bench.next(), ReadDone)
    assert all(bench.block(i) == pattern(i, 1, BLOCK_BYTES) for i in range(40))
    bench.assert_silent()


@pytest.mark.parametrize("faults", [Faults(drop=1.0), Faults(corrupt=1.0)])
def test_a_read_with_silent_damage_is_reported_done(faulty: Callable[[Faults], Bench], faults: Faults) -> None:
    bench = faulty(faults)
    bench.attach("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 4)])
    assert isinstance(bench.next(), ReadDone)
    assert [bench.block(i) == pattern(i, 1, BLOCK_BYTES) for i in range(4)].count(False) == 1


def test_a_stalled_read_is_counted_and_writes_late(faulty: Callable[[Faults], Bench]) -> None:
    bench = faulty(Faults(stall=1.0))
    bench.attach("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 4)])
    wait_until(lambda: bench.mover.stuck_reads == 1)
    bench.mover.disconnect("sender")
    assert bench.block(3) == bytes(BLOCK_BYTES)
    bench.faulty.resume_stalled()
    assert isinstance(bench.next(), ReadDone)
    assert bench.block(3) == pattern(3, 1, BLOCK_BYTES)
    wait_until(lambda: bench.mover.stuck_reads == 0)


def test_a_read_without_progress_is_stuck_after_a_while() -> None:
    bench = Bench()
    clock = FakeClock()
    mover = bench.mover = Mover(lambda: bench.backend, bench.events.put, clock, SMALL)
    mover.start()
    peer = bench.attach("sender")
    bench.fabric.freeze("sender")
    mover.read(1, "sender", [ReadRange(0, 0, 1)])
    wait_until(lambda: mover.reads_in_flight == 1)
    bench.round_trip(peer)
    assert mover.stuck_reads == 0
    clock.advance(STUCK_AFTER_S)
    wait_until(lambda: mover.stuck_reads == 1)
    bench.fabric.thaw("sender")
    done = bench.next()
    assert isinstance(done, ReadDone)
    assert done.total_s == STUCK_AFTER_S
    mover.stop()


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
            self.connect(self.add_sender(name))
            self.turn()
            assert self.next() == Connected(name)

    def turn(self) -> None:
        assert isinstance(self.mover, FakeMover)
        self.manual.advance(self.turn_s)
        self.mover.turn()

    def pass_s(self, seconds: float) -> list[MoverEvent]:
        """The events that are delivered meanwhile."""
        for _ in range(int(seconds / self.turn_s)):
            self.turn()
        said = []
        while not self.events.empty():
            said.append(self.events.get())
        return said


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
    assert (bench.mover.reads_in_flight, bench.mover.bytes_arrived) == (1, BLOCK_BYTES)
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
def digesting(digests: ThreadNotingDigests) -> Iterator[Bench]:
    bench = Bench()
    bench.mover = Mover(lambda: bench.backend, bench.events.put, bench.clock, SMALL, digests)
    bench.mover.start()
    yield bench
    if bench.fabric.find("stopped"):
        bench.fabric.thaw("stopped")
    bench.mover.stop()


def test_a_mover_with_nothing_to_move_computes_digests_itself_after_read_done(
    digesting: Bench, digests: ThreadNotingDigests
) -> None:
    digesting.attach("sender")
    digesting.mover.read(1, "sender", [ReadRange(3, 0, 2)], (3, 4))
    assert isinstance(digesting.next(), ReadDone)
    assert digesting.next() == BlocksDigested(1, {3: 1003, 4: 1004})
    assert digests.threads == ["baton-mover"]


def test_while_there_is_something_to_move_a_helper_computes_them(
    digesting: Bench, digests: ThreadNotingDigests
) -> None:
    digesting.attach("stopped")
    digesting.fabric.freeze("stopped")
    digesting.mover.read(1, "stopped", [ReadRange(20, 0, 1)], (20,))
    wait_until(lambda: digesting.mover.reads_in_flight == 1)
    digesting.attach("sender")
    digesting.mover.read(2, "sender", [ReadRange(3, 0, 2)], (4,))
    said = [digesting.next(), digesting.next()]
    assert BlocksDigested(2, {4: 1004}) in said
    assert digests.threads == ["baton-digests"]


def test_every_block_of_a_long_read_that_is_wanted_is_digested_once(digesting: Bench) -> None:
    digesting.attach("sender")
    wanted = [*range(0, 40, 3), 55]
    digesting.mover.read(1, "sender", [ReadRange(0, 0, 40), ReadRange(50, 50, 10)], wanted)
    found: list[int] = []
    done = False
    while not done or len(found) < len(wanted):
        event = digesting.next()
        done = done or isinstance(event, ReadDone)
        if isinstance(event, BlocksDigested):
            assert all(digest == 1000 + block for block, digest in event.digests.items())
            found += event.digests
    assert sorted(found) == wanted
    digesting.assert_silent()


@pytest.mark.parametrize("parts", [1, 2])
def test_what_a_piece_brings_is_digested_in_one_call_for_each_group(
    digesting: Bench, digests: ThreadNotingDigests, parts: int
) -> None:
    """Ranges of groups take turns."""
    digesting.attach("sender")
    ranges = [ReadRange(block, block, 1, number % 2) for number, block in enumerate(range(3, 11, 2))]
    wanted = [r.local_block * parts + part for r in ranges for part in range(parts)]
    digesting.mover.read(1, "sender", ranges, wanted, parts)
    assert isinstance(digesting.next(), ReadDone)
    found: dict[int, int] = {}
    for _ in range(2):
        event = digesting.next()
        assert isinstance(event, BlocksDigested)
        found |= event.digests
    assert found.keys() == set(wanted)
    assert len(digests.threads) == 2


def test_digests_that_can_not_be_computed_are_reported_and_the_mover_goes_on(
    digesting: Bench, digests: ThreadNotingDigests
) -> None:
    digests.fail = True
    peer = digesting.attach("sender")
    digesting.mover.read(1, "sender", [ReadRange(3, 0, 2)], (3, 4))
    assert isinstance(digesting.next(), ReadDone)
    assert digesting.next() == DigestsFailed(1, "the reader could not compute digests: MemoryError('no digests today')")
    digesting.round_trip(peer)


def test_digests_that_are_not_wanted_are_not_computed(digesting: Bench, digests: ThreadNotingDigests) -> None:
    peer = digesting.attach("sender")
    digesting.mover.read(1, "sender", [ReadRange(3, 0, 2)])
    assert isinstance(digesting.next(), ReadDone)
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


def test_an_event_that_can_not_be_delivered_ends_the_process(faults: queue.SimpleQueue[BackgroundFault]) -> None:
    """Somebody would wait for that event for ever."""
    bench = Bench()

    def deliver(event: MoverEvent) -> None:
        raise ZeroDivisionError("listener")

    mover = bench.mover = Mover(lambda: bench.backend, deliver, SystemClock(), SMALL)
    mover.start()
    mover.read(1, "nobody", [ReadRange(0, 0, 1)])
    assert isinstance(faults.get(timeout=WITHIN_S).__cause__, ZeroDivisionError)
    mover.stop()


def test_digests_that_can_not_be_delivered_end_the_process(
    digesting: Bench, faults: queue.SimpleQueue[BackgroundFault]
) -> None:
    digesting.attach("stopped")
    digesting.fabric.freeze("stopped")
    digesting.attach("sender")

    def deliver(event: MoverEvent) -> None:
        if isinstance(event, BlocksDigested):
            raise ZeroDivisionError("listener")
        digesting.events.put(event)

    assert isinstance(digesting.mover, Mover)
    digesting.mover._digest_queue._deliver = deliver
    digesting.mover.read(1, "stopped", [ReadRange(20, 0, 1)], (20,))
    wait_until(lambda: digesting.mover.reads_in_flight == 1)
    digesting.mover.read(2, "sender", [ReadRange(3, 0, 1)], (3,))
    assert isinstance(digesting.next(), ReadDone)
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
    bench.attach("sender")
    release = bench.backend.release

    def fail_once(handle: ReadHandle) -> None:
        release(handle)
        bench.backend.release = release  # type: ignore[method-assign]
        raise RuntimeError("a foreign error")

    bench.backend.release = fail_once  # type: ignore[method-assign]
    bench.mover.read(1, "sender", [ReadRange(0, 0, 1)])
    assert failure(bench.next()) == (1, TransferCause.REFUSED)
    bench.mover.read(2, "sender", [ReadRange(1, 0, 20)])
    assert isinstance(bench.next(), ReadDone)
    assert bench.mover.fault is None


def test_stop_answers_what_is_queued_and_everything_later(bench: Bench) -> None:
    peer = bench.attach("sender")
    bench.fabric.freeze("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 8)])
    wait_until(lambda: len(bench.backend.posted) == 2)
    bench.mover.read(2, "sender", [ReadRange(8, 0, 8)])
    stopper = threading.Thread(target=bench.mover.stop)
    stopper.start()
    assert failure(bench.next()) == (2, TransferCause.CANCELLED)
    bench.fabric.thaw("sender")
    assert isinstance(bench.next(), ReadDone)
    stopper.join(WITHIN_S)
    assert bench.backend.closed
    for _ in range(2):
        bench.mover.read(3, "sender", [ReadRange(0, 0, 1)])
        assert failure(bench.next()) == (3, TransferCause.CANCELLED)
    bench.connect(peer)
    assert isinstance(bench.next(), ConnectFailed)
    bench.mover.stop()


def test_stop_does_not_wait_for_ever_and_keeps_memory_that_may_be_written() -> None:
    bench = Bench()
    clock = FakeClock()
    mover = bench.mover = Mover(lambda: bench.backend, bench.events.put, clock, SMALL)
    mover.start()
    bench.attach("sender")
    bench.fabric.freeze("sender")
    mover.read(1, "sender", [ReadRange(0, 0, 1)])
    mover.read(2, "sender", [ReadRange(8, 0, 30)])
    wait_until(lambda: len(bench.backend.posted) == 2)
    stopper = threading.Thread(target=mover.stop)
    stopper.start()
    while stopper.is_alive():
        clock.advance(STOP_WITHIN_S)
        stopper.join(0.001)
    bench.assert_silent()
    assert mover.reads_in_flight == 2
    assert mover.fault is None
    assert not bench.backend.closed


def test_a_fault_ends_the_thread_and_answers_only_what_can_be_answered(
    faults: queue.SimpleQueue[BackgroundFault],
) -> None:
    bench = Bench()
    bench.mover.start()
    bench.attach("sender")
    bench.fabric.freeze("sender")
    bench.mover.read(1, "sender", [ReadRange(0, 0, 8)])
    wait_until(lambda: len(bench.backend.posted) == 2)
    bench.mover.read(2, "sender", [ReadRange(8, 0, 8)])
    bench.backend.poll = _fail  # type: ignore[method-assign]
    assert failure(bench.next()) == (2, TransferCause.CANCELLED)
    wait_until(lambda: bench.mover.fault is not None)
    assert bench.mover.reads_in_flight == 1
    assert isinstance(faults.get_nowait().__cause__, ZeroDivisionError)
    bench.mover.stop()


def _fail(handle: ReadHandle) -> ReadState:
    raise ZeroDivisionError("a fault of the backend")

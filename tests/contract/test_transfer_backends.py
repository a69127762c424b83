"""One suite over every transfer backend: the in-memory fake, NIXL over shared memory, NIXL over TCP, and two of them
under the decorator that injects faults, with no faults set.

NIXL's senders are processes of their own. A sender that does not pump has not even completed its handshake with a new
receiver, so a first read from it stays in flight as long as a test likes, over any transport.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Protocol

import pytest

from baton.clock import SystemClock
from baton.engine.runner import KVLayout, KVMemory, LayerGroup
from baton.errors import TransferCause, TransferFailed
from kv_transfer.backends.base import (
    BadRange,
    PeerGone,
    PeerMemory,
    ReadHandle,
    ReadsInFlight,
    ReadState,
    TransferBackend,
    coalesce,
)
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.mover.mover import Mover
from kv_transfer.mover.part_mover import Connected, ReadDone
from kv_transfer.mover.pieces import WindowLimits
from kv_transfer.piece_plan import ReadRange
from tests.doubles.fake_transfer_backend import FakeTransferBackend, FakeTransferFabric
from tests.doubles.faulty_transfer_backend import FaultyTransferBackend
from tests.support.mover_events import MoverEvents
from tests.support.transfer_sender import Sender, fill, new_memory, pattern

NUM_BLOCKS = 96
BLOCK_BYTES = 4096
WITHIN_S = 90.0
MANY_POLLS = 500
KINDS = ("memory", "memory-decorated", "nixl", "nixl-decorated", "nixl-tcp")
TLS = {"nixl-tcp": "tcp,self"}


class AnySender(Protocol):
    """The interface of a sender, in this process or another."""

    memory: PeerMemory

    def pump(self, on: bool) -> None: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class LocalSender:
    """A sender on the in-memory fabric; its mover pumps, as that of a prefill node does."""

    def __init__(self, fabric: FakeTransferFabric, incarnation: str) -> None:
        memory, buffer = new_memory(NUM_BLOCKS, BLOCK_BYTES)
        fill(buffer, memory, salt=1)
        self._fabric = fabric
        self._mover = Mover(lambda: FakeTransferBackend(fabric, incarnation, memory), lambda event: None, SystemClock())
        self._mover.start()
        self.memory = PeerMemory.of(memory, incarnation, self._mover.agent_metadata)

    def pump(self, on: bool) -> None:
        self._mover.set_num_readers(int(on))

    def freeze(self) -> None:
        self._fabric.freeze(self.memory.incarnation)

    def thaw(self) -> None:
        self._fabric.thaw(self.memory.incarnation)

    def kill(self) -> None:
        self._fabric.kill(self.memory.incarnation)

    def close(self) -> None:
        self._mover.stop()


class Rig:
    """Makes receivers and senders of one kind, and ends them."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._fabric = FakeTransferFabric(sender_must_pump=True)
        self._names = (f"{kind}-{i}" for i in itertools.count())
        self._senders: list[AnySender] = []
        self.local, _ = new_memory(NUM_BLOCKS, BLOCK_BYTES)

    def new_backend(self, memory: KVMemory | None = None) -> TransferBackend:
        name = next(self._names)
        backend: TransferBackend
        if self._is_local:
            backend = FakeTransferBackend(self._fabric, name, memory or self.local)
        else:
            backend = NixlBackend(name, memory or self.local)
        return FaultyTransferBackend(backend) if self._kind.endswith("-decorated") else backend

    @property
    def _is_local(self) -> bool:
        return self._kind.startswith("memory")

    def new_sender(self, pump: bool = True) -> AnySender:
        name = next(self._names)
        sender: AnySender
        if self._is_local:
            sender = LocalSender(self._fabric, name)
        else:
            sender = Sender(TLS.get(self._kind), name, NUM_BLOCKS, BLOCK_BYTES)
        self._senders.append(sender)
        sender.pump(pump)
        return sender

    def clear(self) -> None:
        ctypes.memset(self.local.base_address, 0, self.local.num_bytes)

    def block(self, index: int) -> bytes:
        return ctypes.string_at(self.local.base_address + index * BLOCK_BYTES, BLOCK_BYTES)

    def snapshot(self) -> bytes:
        return ctypes.string_at(self.local.base_address, self.local.num_bytes)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        tls = TLS.get(request.param)
        # UCX reads it when an agent is made.
        patch.setenv("UCX_TLS", tls) if tls else patch.delenv("UCX_TLS", raising=False)
        made = Rig(request.param)
        yield made
        made.close()


@pytest.fixture(scope="module")
def receiver(rig: Rig) -> Iterator[TransferBackend]:
    backend = rig.new_backend()
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def shared_sender(rig: Rig) -> AnySender:
    return rig.new_sender()


@pytest.fixture
def sender(rig: Rig, receiver: TransferBackend, shared_sender: AnySender) -> Iterator[AnySender]:
    """A pumping sender, connected for the time of one test."""
    rig.clear()
    receiver.connect(shared_sender.memory)
    yield shared_sender
    receiver.disconnect(shared_sender.memory.incarnation)


@pytest.fixture
def fresh_sender(rig: Rig, receiver: TransferBackend) -> Iterator[AnySender]:
    """A sender that never pumped, connected, for tests that end it."""
    rig.clear()
    made = rig.new_sender(pump=False)
    receiver.connect(made.memory)
    yield made
    made.kill()


def wait_until_done(backend: TransferBackend, handle: ReadHandle) -> None:
    """Poll until the read is DONE, and release it."""
    wait_until(lambda: backend.poll(handle) is ReadState.DONE)
    backend.release(handle)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.0001)  # a mover's own thread needs the core, and may take a second


def wait_until_lost(backend: TransferBackend, handle: ReadHandle) -> None:
    """Poll until the read's peer is found gone, and release it."""
    with pytest.raises(PeerGone):
        wait_until(lambda: backend.poll(handle) is ReadState.DONE)
    backend.release(handle)


# Bytes


def some_blocks(seed: int) -> tuple[Sequence[int], Sequence[int]]:
    rng = Random(seed)
    count = rng.randrange(1, NUM_BLOCKS)
    return rng.sample(range(NUM_BLOCKS), count), rng.sample(range(NUM_BLOCKS), count)


@pytest.mark.parametrize(
    ("local", "remote"),
    [*map(some_blocks, range(4)), ([4, 9], [7, 7]), (range(NUM_BLOCKS), range(NUM_BLOCKS))],
    ids=["0", "1", "2", "3", "to two places", "one range"],
)
def test_any_choice_of_blocks_arrives_where_it_belongs(
    rig: Rig, receiver: TransferBackend, sender: AnySender, local: Sequence[int], remote: Sequence[int]
) -> None:
    wait_until_done(receiver, receiver.post_read(sender.memory.incarnation, coalesce(local, remote)))
    expected = dict(zip(local, remote, strict=True))
    for index in range(NUM_BLOCKS):
        want = pattern(expected[index], 1, BLOCK_BYTES) if index in expected else bytes(BLOCK_BYTES)
        assert rig.block(index) == want, f"block {index}"


def test_many_concurrent_reads_can_be_polled_in_any_order(
    rig: Rig, receiver: TransferBackend, sender: AnySender
) -> None:
    order = list(range(NUM_BLOCKS))
    Random(7).shuffle(order)
    name = sender.memory.incarnation
    handles = [receiver.post_read(name, [ReadRange(i, remote, 1)]) for i, remote in enumerate(order)]
    assert len(set(handles)) == NUM_BLOCKS
    for handle in reversed(handles):
        wait_until_done(receiver, handle)
    assert all(rig.block(i) == pattern(remote, 1, BLOCK_BYTES) for i, remote in enumerate(order))


def test_done_stays_done_until_it_is_released(receiver: TransferBackend, sender: AnySender) -> None:
    handle = receiver.post_read(sender.memory.incarnation, [ReadRange(0, 0, 1)])
    wait_until(lambda: receiver.poll(handle) is ReadState.DONE)
    assert receiver.poll(handle) is ReadState.DONE
    receiver.release(handle)
    with pytest.raises(KeyError):
        receiver.poll(handle)
    with pytest.raises(KeyError):
        receiver.release(handle)


# What is refused


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [ReadRange(-1, 0, 1)],
        [ReadRange(0, -1, 1)],
        [ReadRange(0, 0, 0)],
        [ReadRange(0, 0, -1)],
        [ReadRange(NUM_BLOCKS, 0, 1)],
        [ReadRange(0, NUM_BLOCKS, 1)],
        [ReadRange(NUM_BLOCKS - 1, 0, 2)],
        [ReadRange(0, NUM_BLOCKS - 1, 2)],
        [ReadRange(0, 2**62, 1)],
        [ReadRange(0, 0, 2**62)],
        [ReadRange(0, 0, 2), ReadRange(1, 5, 1)],
        [ReadRange(5, 0, 1), ReadRange(0, 1, 8)],
        [ReadRange(3, 0, 1), ReadRange(0, NUM_BLOCKS, 1)],
    ],
)
def test_invalid_ranges_are_refused_and_nothing_is_read(
    rig: Rig, receiver: TransferBackend, sender: AnySender, ranges: list[ReadRange]
) -> None:
    with pytest.raises(BadRange) as caught:
        receiver.post_read(sender.memory.incarnation, ranges)
    assert caught.value.cause is TransferCause.REFUSED
    wait_until_done(receiver, receiver.post_read(sender.memory.incarnation, [ReadRange(NUM_BLOCKS - 1, 0, 1)]))
    assert rig.snapshot()[: -1 * BLOCK_BYTES] == bytes((NUM_BLOCKS - 1) * BLOCK_BYTES)


def test_an_unknown_peer_is_gone(receiver: TransferBackend) -> None:
    with pytest.raises(PeerGone):
        receiver.post_read("never-heard-of", [ReadRange(0, 0, 1)])
    receiver.disconnect("never-heard-of")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"block_bytes": BLOCK_BYTES * 2}, TransferCause.LAYOUT_MISMATCH),
        ({"block_bytes": 0}, TransferCause.LAYOUT_MISMATCH),
        ({"num_blocks": 0}, TransferCause.REFUSED),
        ({"num_blocks": 2**60}, TransferCause.REFUSED),
        ({"num_blocks": NUM_BLOCKS * 1000}, TransferCause.REFUSED),
        ({"base_address": 0}, TransferCause.REFUSED),
        ({"base_address": 2**64 - 1}, TransferCause.REFUSED),
        ({"base_address": 4096}, TransferCause.REFUSED),
        ({"kind": "FILE"}, TransferCause.REFUSED),
        ({"device_id": -1}, TransferCause.REFUSED),
        ({"agent_metadata": b""}, TransferCause.REFUSED),
        ({"agent_metadata": b"garbage"}, TransferCause.REFUSED),
        ({"agent_metadata": bytes(1 << 20)}, TransferCause.REFUSED),
        ({"incarnation": ""}, TransferCause.REFUSED),
        ({"incarnation": "somebody-else"}, TransferCause.REFUSED),
    ],
)
def test_invalid_descriptions_of_a_senders_memory_are_refused(
    rig: Rig, receiver: TransferBackend, shared_sender: AnySender, change: dict[str, object], cause: TransferCause
) -> None:
    with pytest.raises(TransferFailed) as caught:
        receiver.connect(dataclasses.replace(shared_sender.memory, **change))  # type: ignore[arg-type]
    assert caught.value.cause is cause
    receiver.connect(shared_sender.memory)
    wait_until_done(receiver, receiver.post_read(shared_sender.memory.incarnation, [ReadRange(1, 2, 1)]))
    assert rig.block(1) == pattern(2, 1, BLOCK_BYTES)
    receiver.disconnect(shared_sender.memory.incarnation)


def test_a_connected_name_or_agent_can_not_be_connected_again(
    rig: Rig, receiver: TransferBackend, sender: AnySender
) -> None:
    impostor = dataclasses.replace(rig.new_sender().memory, incarnation=sender.memory.incarnation)
    thief = dataclasses.replace(sender.memory, incarnation="thief")
    for refused in (sender.memory, impostor, thief):
        with pytest.raises(TransferFailed) as caught:
            receiver.connect(refused)
        assert caught.value.cause is TransferCause.REFUSED
    wait_until_done(receiver, receiver.post_read(sender.memory.incarnation, [ReadRange(1, 2, 1)]))
    assert rig.block(1) == pattern(2, 1, BLOCK_BYTES)


# Reads in flight


def test_a_read_waits_until_the_sender_pumps_and_can_not_be_released_in_flight(
    rig: Rig, receiver: TransferBackend, fresh_sender: AnySender
) -> None:
    name = fresh_sender.memory.incarnation
    handle = receiver.post_read(name, [ReadRange(3, 5, 2)])
    assert all(receiver.poll(handle) is ReadState.IN_PROGRESS for _ in range(MANY_POLLS))
    with pytest.raises(ReadsInFlight):
        receiver.release(handle)
    with pytest.raises(ReadsInFlight):
        receiver.disconnect(name)
    with pytest.raises(ReadsInFlight):
        receiver.close()
    fresh_sender.pump(True)
    wait_until_done(receiver, handle)
    assert rig.block(3) + rig.block(4) == pattern(5, 1, BLOCK_BYTES) + pattern(6, 1, BLOCK_BYTES)
    receiver.disconnect(name)


def test_a_peer_that_was_dropped_can_be_connected_again(receiver: TransferBackend, sender: AnySender) -> None:
    name = sender.memory.incarnation
    receiver.disconnect(name)
    with pytest.raises(PeerGone):
        receiver.post_read(name, [ReadRange(0, 0, 1)])
    receiver.connect(sender.memory)
    wait_until_done(receiver, receiver.post_read(name, [ReadRange(0, 0, 1)]))


def test_a_stopped_peer_leaves_its_read_in_flight(rig: Rig, receiver: TransferBackend, fresh_sender: AnySender) -> None:
    fresh_sender.pump(True)
    fresh_sender.freeze()
    handle = receiver.post_read(fresh_sender.memory.incarnation, [ReadRange(0, 1, 1)])
    assert all(receiver.poll(handle) is ReadState.IN_PROGRESS for _ in range(MANY_POLLS))
    fresh_sender.thaw()
    wait_until_done(receiver, handle)
    assert rig.block(0) == pattern(1, 1, BLOCK_BYTES)
    receiver.disconnect(fresh_sender.memory.incarnation)


def test_a_killed_peer_ends_its_reads_for_good(rig: Rig, receiver: TransferBackend, fresh_sender: AnySender) -> None:
    name = fresh_sender.memory.incarnation
    handles = [receiver.post_read(name, [ReadRange(8 * i, 8 * i, 8)]) for i in range(4)]
    assert receiver.poll(handles[0]) is ReadState.IN_PROGRESS
    fresh_sender.kill()
    for handle in handles:
        wait_until_lost(receiver, handle)
    after = rig.snapshot()
    for _ in range(MANY_POLLS):
        receiver.pump()
    assert rig.snapshot() == after
    with pytest.raises(PeerGone):
        receiver.post_read(name, [ReadRange(0, 0, 1)])
    receiver.disconnect(name)


def test_a_peer_killed_between_reads_is_found_gone(receiver: TransferBackend, fresh_sender: AnySender) -> None:
    name = fresh_sender.memory.incarnation
    fresh_sender.pump(True)
    wait_until_done(receiver, receiver.post_read(name, [ReadRange(0, 0, 8)]))
    fresh_sender.kill()

    def read_again() -> bool:
        handle = receiver.post_read(name, [ReadRange(0, 0, 8)])
        wait_until_lost(receiver, handle)
        return False

    with pytest.raises(PeerGone):
        wait_until(read_again)
    receiver.disconnect(name)


def test_a_dead_peer_disturbs_no_other(
    rig: Rig, receiver: TransferBackend, sender: AnySender, fresh_sender: AnySender
) -> None:
    doomed = receiver.post_read(fresh_sender.memory.incarnation, [ReadRange(0, 0, 1)])
    alive = receiver.post_read(sender.memory.incarnation, [ReadRange(1, 6, 1)])
    fresh_sender.kill()
    wait_until_lost(receiver, doomed)
    wait_until_done(receiver, alive)
    assert rig.block(1) == pattern(6, 1, BLOCK_BYTES)
    receiver.disconnect(fresh_sender.memory.incarnation)


# Memories that hold some layers

LAYOUT = KVLayout.uniform(16, num_layers=4, num_kv_heads=1, head_dim=16, dtype="float32")
LAYER_BYTES = BLOCK_BYTES // 2


def part_of(sender: AnySender, layers: range, block_size: int = 16) -> PeerMemory:
    """The sender's memory as one whose blocks hold these layers."""
    return dataclasses.replace(sender.memory, layers=layers, block_size=block_size)


@pytest.fixture
def parts(rig: Rig, shared_sender: AnySender) -> Iterator[tuple[KVMemory, TransferBackend, list[PeerMemory]]]:
    """A memory of the layers 1 to 3, its agent, and two senders that hold the layers 0 and 1, and 2 and 3."""
    other = rig.new_sender()
    memory, _ = new_memory(NUM_BLOCKS, 3 * LAYER_BYTES)
    memory = dataclasses.replace(memory, layout=LAYOUT, layers=range(1, 4))
    backend = rig.new_backend(memory)
    peers = [part_of(shared_sender, range(2)), part_of(other, range(2, 4))]
    for peer in peers:
        backend.connect(peer)
    yield memory, backend, peers
    backend.close()


def test_each_pair_of_parts_moves_the_layers_in_common(
    parts: tuple[KVMemory, TransferBackend, list[PeerMemory]],
) -> None:
    memory, backend, (first, second) = parts
    handles = [
        backend.post_read(first.incarnation, [ReadRange(2, 5, 3)]),
        backend.post_read(second.incarnation, [ReadRange(2, 8, 3), ReadRange(90, 0, 1)]),
    ]
    for handle in handles:
        wait_until_done(backend, handle)
    blocks = [
        ctypes.string_at(memory.base_address + at * memory.block_bytes, memory.block_bytes) for at in range(NUM_BLOCKS)
    ]
    for at in range(3):
        assert blocks[2 + at][:LAYER_BYTES] == pattern(5 + at, 1, BLOCK_BYTES)[LAYER_BYTES:]
        assert blocks[2 + at][LAYER_BYTES:] == pattern(8 + at, 1, BLOCK_BYTES)
    assert blocks[90] == bytes(LAYER_BYTES) + pattern(0, 1, BLOCK_BYTES)
    assert all(block == bytes(memory.block_bytes) for at, block in enumerate(blocks) if at not in (2, 3, 4, 90))


def test_parts_with_blocks_of_different_sizes_move_the_layers_in_common(rig: Rig, shared_sender: AnySender) -> None:
    memory, _ = new_memory(NUM_BLOCKS, 2 * LAYER_BYTES)
    backend = rig.new_backend(dataclasses.replace(memory, layout=LAYOUT, layers=range(2, 4)))
    peer = part_of(shared_sender, range(3, 4), block_size=32)
    backend.connect(peer)
    wait_until_done(backend, backend.post_read(peer.incarnation, [ReadRange(6, 2 * 7 + 1, 1)]))
    backend.close()
    keys, values = pattern(7, 1, BLOCK_BYTES)[:LAYER_BYTES], pattern(7, 1, BLOCK_BYTES)[LAYER_BYTES:]
    half = LAYER_BYTES // 2
    expected = bytes(13 * LAYER_BYTES) + keys[half:] + values[half:]
    assert ctypes.string_at(memory.base_address, memory.num_bytes) == expected.ljust(memory.num_bytes, b"\0")


def test_a_read_of_a_group_without_common_layers_is_done_at_once(rig: Rig, shared_sender: AnySender) -> None:
    groups = (LayerGroup((0, 1)), LayerGroup((2, 3), 5))
    memory, _ = new_memory(NUM_BLOCKS, 2 * LAYER_BYTES)
    layout = dataclasses.replace(LAYOUT, groups=groups)
    backend = rig.new_backend(dataclasses.replace(memory, layout=layout, layers=range(3)))
    peer = part_of(shared_sender, range(2, 4))
    backend.connect(peer)
    wait_until_done(backend, backend.post_read(peer.incarnation, [ReadRange(6, 7, 2)]))
    assert not any(ctypes.string_at(memory.base_address, memory.num_bytes))
    wait_until_done(backend, backend.post_read(peer.incarnation, [ReadRange(6, 7, 2), ReadRange(1, 2, 1, group=1)]))
    expected = bytes(2 * LAYER_BYTES) + pattern(2, 1, BLOCK_BYTES)[:LAYER_BYTES]
    assert ctypes.string_at(memory.base_address, memory.num_bytes) == expected.ljust(memory.num_bytes, b"\0")
    backend.close()


# The mover over each of them


@pytest.fixture
def events() -> MoverEvents:
    return MoverEvents()


@pytest.fixture
def mover(rig: Rig, events: MoverEvents) -> Iterator[Mover]:
    rig.clear()
    limits = WindowLimits(bytes_in_flight=16 * BLOCK_BYTES, posts_in_flight=4, piece_bytes=5 * BLOCK_BYTES)
    made = Mover(rig.new_backend, events.put, SystemClock(), limits)
    made.start()
    yield made
    made.stop()


def attach(mover: Mover, events: MoverEvents, sender: AnySender) -> str:
    mover.connect(sender.memory)
    name = sender.memory.incarnation
    assert events.next() == Connected(name)
    return name


def test_the_mover_reads_in_pieces_and_answers_once(
    rig: Rig, mover: Mover, events: MoverEvents, shared_sender: AnySender
) -> None:
    name = attach(mover, events, shared_sender)
    order = list(range(NUM_BLOCKS))
    Random(3).shuffle(order)
    third = NUM_BLOCKS // 3
    for read_id in range(3):
        own = slice(read_id * third, (read_id + 1) * third)
        mover.read(read_id, name, coalesce(range(NUM_BLOCKS)[own], order[own]))
    answers = [events.next_of(ReadDone) for _ in range(3)]
    assert {answer.read_id: answer.num_bytes for answer in answers} == dict.fromkeys(range(3), third * BLOCK_BYTES)
    assert all(rig.block(i) == pattern(remote, 1, BLOCK_BYTES) for i, remote in enumerate(order))
    assert mover.figures.reads_in_flight == 0
    assert events.empty()


def test_the_mover_reports_a_killed_peer(rig: Rig, mover: Mover, events: MoverEvents, shared_sender: AnySender) -> None:
    doomed = rig.new_sender(pump=False)
    name, other = attach(mover, events, doomed), attach(mover, events, shared_sender)
    for read_id in range(4):
        mover.read(read_id, name, [ReadRange(20 * read_id, 0, 20)])
    doomed.kill()
    assert dict(events.failure() for _ in range(4)) == dict.fromkeys(range(4), TransferCause.PEER_GONE)
    mover.read(9, other, [ReadRange(0, 3, 1)])
    events.next_of(ReadDone)
    assert rig.block(0) == pattern(3, 1, BLOCK_BYTES)
    assert mover.figures.reads_in_flight == 0


def test_reads_of_a_stopped_peer_stay_counted_until_it_dies(rig: Rig, mover: Mover, events: MoverEvents) -> None:
    stopped = rig.new_sender()
    stopped.freeze()
    name = attach(mover, events, stopped)
    mover.read(1, name, [ReadRange(0, 0, 16)])
    wait_until(lambda: mover.figures.reads_in_flight == 1 and mover.figures.stuck_reads == 1)
    mover.read(2, name, [ReadRange(70, 5, 2)])
    mover.disconnect(name)
    assert events.failure() == (2, TransferCause.CANCELLED)
    assert mover.figures.reads_in_flight == 1
    stopped.kill()
    assert events.failure() == (1, TransferCause.PEER_GONE)
    assert mover.figures.reads_in_flight == 0

"""Each injected fault does what its name says, and none of them breaks the backends' contract."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from random import Random

import pytest

from baton.engine.runner import KVMemory
from baton.errors import ConfigError
from kv_transfer.backends.base import PeerGone, PeerMemory, ReadHandle, ReadsInFlight, ReadState, coalesce
from kv_transfer.piece_plan import ReadRange
from tests.doubles.fake_transfer_backend import FakeTransferBackend, FakeTransferFabric
from tests.doubles.faulty_transfer_backend import Faults, FaultyTransferBackend
from tests.support.transfer_sender import fill, new_memory, pattern

NUM_BLOCKS = 16
BLOCK_BYTES = 64
POLLS = 3
WHOLE = [ReadRange(0, 0, 4), ReadRange(8, 8, 4)]
TARGETS = [0, 1, 2, 3, 8, 9, 10, 11]


class Bench:
    """A receiver with injected faults, and a sender whose block i is read into local block i."""

    def __init__(self, faults: Faults) -> None:
        self.fabric = FakeTransferFabric()
        self.local, _ = new_memory(NUM_BLOCKS, BLOCK_BYTES)
        memory, buffer = new_memory(NUM_BLOCKS, BLOCK_BYTES)
        fill(buffer, memory, salt=1)
        sender = FakeTransferBackend(self.fabric, "sender", memory)
        self.backend = FaultyTransferBackend(
            FakeTransferBackend(self.fabric, "receiver", self.local), replace(faults, polls=POLLS)
        )
        self.sender = PeerMemory.of(memory, "sender", sender.agent_metadata())
        self.backend.connect(self.sender)

    def right(self) -> list[int]:
        """The local blocks that hold the same bytes as the sender's."""
        size = BLOCK_BYTES
        base = self.local.base_address
        return [i for i in range(NUM_BLOCKS) if ctypes.string_at(base + i * size, size) == pattern(i, 1, size)]

    def polls_until_done(self, handle: ReadHandle) -> int:
        for count in range(1, 200):
            if self.backend.poll(handle) is ReadState.DONE:
                return count
        raise AssertionError("it never ends")


def test_a_delayed_read_begins_late() -> None:
    bench = Bench(Faults(delay=1.0))
    handle = bench.backend.post_read("sender", WHOLE)
    for _ in range(POLLS):
        assert bench.backend.poll(handle) is ReadState.IN_PROGRESS
        assert bench.right() == []
    with pytest.raises(ReadsInFlight):
        bench.backend.release(handle)
    with pytest.raises(ReadsInFlight):
        bench.backend.disconnect("sender")
    bench.polls_until_done(handle)
    assert bench.right() == TARGETS


def test_a_late_read_is_reported_done_long_after_its_last_byte() -> None:
    bench = Bench(Faults(late=1.0))
    handle = bench.backend.post_read("sender", WHOLE)
    assert bench.backend.poll(handle) is ReadState.IN_PROGRESS
    assert bench.right() == TARGETS
    with pytest.raises(ReadsInFlight):
        bench.backend.release(handle)
    assert bench.polls_until_done(handle) == POLLS


def test_a_slow_read_brings_one_block_after_the_other() -> None:
    bench = Bench(Faults(slow=1.0))
    handle = bench.backend.post_read("sender", WHOLE)
    seen = [bench.right()]
    while bench.backend.poll(handle) is ReadState.IN_PROGRESS:
        if bench.right() != seen[-1]:
            seen.append(bench.right())
    assert [*seen, bench.right()] == [TARGETS[:count] for count in range(len(TARGETS) + 1)]


def test_a_stalled_read_goes_on_when_it_is_resumed() -> None:
    bench = Bench(Faults(stall=1.0))
    handle = bench.backend.post_read("sender", WHOLE)
    assert all(bench.backend.poll(handle) is ReadState.IN_PROGRESS for _ in range(100))
    assert bench.right() == TARGETS[:4]
    bench.backend.resume_stalled()
    bench.polls_until_done(handle)
    assert bench.right() == TARGETS


def test_a_read_with_a_dropped_block_is_reported_done() -> None:
    bench = Bench(Faults(drop=1.0))
    bench.polls_until_done(bench.backend.post_read("sender", WHOLE))
    assert bench.right() == TARGETS[:-1]


def test_one_bit_is_flipped_in_one_block() -> None:
    bench = Bench(Faults(corrupt=1.0))
    bench.polls_until_done(bench.backend.post_read("sender", WHOLE))
    assert len(bench.right()) == len(TARGETS) - 1
    (bad,) = set(TARGETS) - set(bench.right())
    held = ctypes.string_at(bench.local.base_address + bad * BLOCK_BYTES, BLOCK_BYTES)
    changed = int.from_bytes(held, "big") ^ int.from_bytes(pattern(bad, 1, BLOCK_BYTES), "big")
    assert changed.bit_count() == 1


def test_memory_out_of_reach_is_not_damaged() -> None:
    memory, _ = new_memory(NUM_BLOCKS, BLOCK_BYTES)
    device = replace(memory, kind="VRAM")
    with pytest.raises(ConfigError, match="VRAM"):
        FaultyTransferBackend(FakeTransferBackend(FakeTransferFabric(), "receiver", device), Faults(corrupt=0.1))


def test_a_disconnected_read_writes_half_and_then_never_again_and_takes_the_others_along() -> None:
    bench = Bench(Faults(disconnect=1.0, slow=1.0))
    handles = [bench.backend.post_read("sender", WHOLE), bench.backend.post_read("sender", [ReadRange(12, 12, 4)])]
    for handle in handles * 2:
        with pytest.raises(PeerGone):
            bench.polls_until_done(handle)
    assert bench.right() == [*TARGETS[:4], 12]
    with pytest.raises(PeerGone):
        bench.backend.post_read("sender", WHOLE)
    for handle in handles:
        bench.backend.release(handle)
    bench.backend.disconnect("sender")
    bench.backend.connect(bench.sender)
    assert bench.backend.poll(bench.backend.post_read("sender", WHOLE)) is ReadState.IN_PROGRESS


def test_a_duplicate_is_reported_done_again() -> None:
    bench = Bench(Faults(duplicate=1.0))
    handle = bench.backend.post_read("sender", WHOLE)
    bench.polls_until_done(handle)
    bench.backend.release(handle)
    assert bench.backend.poll(handle) is ReadState.DONE


def test_a_peer_that_dies_between_two_parts_is_gone() -> None:
    bench = Bench(Faults(slow=1.0))
    handle = bench.backend.post_read("sender", WHOLE)
    bench.backend.poll(handle)
    bench.fabric.kill("sender")
    with pytest.raises(PeerGone):
        bench.polls_until_done(handle)
    bench.backend.release(handle)


def everything(seed: int) -> Faults:
    return Faults(seed, POLLS, *(8 * [0.3]))


def ending(seed: int) -> tuple[list[str], list[int]]:
    """Run reads with all faults at once and check what must always hold; returns their ends and the right blocks."""
    bench, rng, ends = Bench(everything(seed)), Random(seed), []
    for number in range(12):
        bench.backend.disconnect("sender")
        bench.backend.connect(bench.sender)
        count = rng.randrange(1, NUM_BLOCKS)
        blocks = rng.sample(range(NUM_BLOCKS), count)
        handle = bench.backend.post_read("sender", coalesce(blocks, blocks))
        for _ in range(4):
            bench.backend.pump()
        if number % 3 == 0:
            bench.backend.resume_stalled()
        try:
            for _ in range(10 + 2 * POLLS * NUM_BLOCKS):
                if bench.backend.poll(handle) is ReadState.DONE:
                    ends.append("done")
                    break
            else:
                bench.backend.resume_stalled()
                bench.polls_until_done(handle)
                ends.append("stalled")
        except PeerGone:
            ends.append("gone")
        before = snapshot(bench.local)
        bench.backend.pump()
        bench.backend.release(handle)
        assert snapshot(bench.local) == before, "it wrote after its end"
    bench.backend.disconnect("sender")
    bench.backend.close()
    return ends, bench.right()


def snapshot(memory: KVMemory) -> bytes:
    return ctypes.string_at(memory.base_address, memory.num_bytes)


def test_every_mixture_ends_and_nothing_is_written_after_it_and_a_seed_repeats_it() -> None:
    all_ends: set[str] = set()
    for seed in range(60):
        ends, right = ending(seed)
        assert (ends, right) == ending(seed)
        all_ends.update(ends)
    assert all_ends == {"done", "stalled", "gone"}

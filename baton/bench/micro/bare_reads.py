"""Measures NIXL reads without Baton, and through Baton's mover: two processes, two agents, a loop.

On a node, blocks are in no processor cache when they are read, since a step reads all weights in between. Therefore the
loops read other blocks each time, of more memory than any cache holds.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from statistics import median

import numpy as np

from baton.clock import SystemClock
from baton.engine.runner import KVLayout, KVMemory
from baton.errors import BatonError
from baton.runner.blocks.block_digests import block_digests
from kv_transfer.backends.base import PeerMemory, ReadState
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.mover.mover import Mover
from kv_transfer.mover.part_mover import BlocksDigested, MoverEvent, ReadDone
from kv_transfer.piece_plan import PiecePlan, ReadRange

_COLD_BYTES = 256 << 20
"""Memory on each side: several times the share of one core in the last-level cache of any processor."""
_ROUNDS = 8
_READS = 12
"""Reads of each kind in a round."""
_PUMP_S = 0.0005
"""How often the sender makes progress. Less often, reads wait for it; more often, it uses the receiver's core."""


def host_memory(num_blocks: int, block_bytes: int) -> KVMemory:
    """Host memory whose pages are mapped, as on a running node."""
    owner = np.ones(num_blocks * block_bytes, dtype=np.uint8)
    return KVMemory(owner.ctypes.data, num_blocks, block_bytes, "DRAM", 0, owner)


@dataclass(frozen=True, slots=True)
class Sender:
    """A process whose memory can be read."""

    memory: PeerMemory
    num_blocks: int
    """Number of its blocks. A reader has as many bytes."""
    reader: KVLayout | None = None
    """Layout of its readers, if their blocks have another size; `memory.block_size` is the sender's then."""

    @property
    def plan(self) -> PiecePlan:
        if self.reader is None or self.memory.block_size is None:
            return PiecePlan.of_equal_blocks(self.memory.block_bytes)
        return PiecePlan.between(self.reader, self.memory.block_size)

    def new_reader_memory(self) -> KVMemory:
        """Memory for a reader."""
        block_bytes = self.plan.local_block_bytes
        num_blocks = self.num_blocks * self.memory.block_bytes // block_bytes
        return replace(host_memory(num_blocks, block_bytes), layout=self.reader)


@contextmanager
def bare_sender(
    block_bytes: int, num_blocks: int, reader: KVLayout | None = None, block_size: int | None = None
) -> Iterator[Sender]:
    """Starts a sender for reads of up to `num_blocks` blocks, over the transports that `UCX_TLS` allows.

    `reader`: the layout of its readers, and `block_size` its own block size, if the two differ.
    """
    num_blocks *= max(2, _COLD_BYTES // (num_blocks * block_bytes))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, block_bytes, num_blocks), daemon=True)
    process.start()
    try:
        yield Sender(replace(ours.recv(), block_size=block_size), num_blocks, reader)
    finally:
        ours.send("stop")
        process.join(10)
        if process.is_alive():
            process.kill()


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """Medians over rounds."""

    bare_ms: float
    """Milliseconds from the post of a read to its end, in a bare loop."""
    mover_ms: float
    """Milliseconds from the end of a read to the end of the next one, in a mover that always has another read."""
    mover_share: float
    """The mover's bandwidth as a share of the bare loop's, compared round by round because the machine's speed drifts.
    """
    mover_share_min: float
    mover_share_max: float
    """The smallest and the largest of the rounds."""
    digest_cost: float
    """Time that digests add until the last one is known, as a share of the mover's time without digests, compared round
    by round."""
    num_bytes: int
    """Bytes of one read, as the mover has counted them."""


def read_times(sender: Sender, num_blocks: int) -> ReadTimes:
    """Measures reads of `num_blocks` adjacent blocks of the sender, or of their sub-blocks.

    Bare loop, mover, and mover with digests are interleaved. The bare loop posts the same descriptors as the mover.
    """
    count = num_blocks * sender.plan.remote_parts
    places = itertools.cycle(range(0, sender.num_blocks * sender.plan.remote_parts - count + 1, count))
    reads = ([ReadRange(block, block, count)] for block in places)
    bare: list[float] = []
    plain: list[_MoverTimes] = []
    digested: list[_MoverTimes] = []
    with _bare_reader(sender) as backend, _mover_reader(sender) as mover:
        for number in range(_ROUNDS):
            batch = list(itertools.islice(reads, _READS))
            bare.append(_bare_ms(backend, sender, batch))
            # The order alternates, since the first measurement may find the digest thread asleep.
            for with_digests in (False, True) if number % 2 else (True, False):
                (digested if with_digests else plain).append(mover.read(batch, with_digests=with_digests))
    shares = [bare_ms / moved.read_ms for bare_ms, moved in zip(bare, plain, strict=True)]
    costs = [slow.total_ms / quick.total_ms - 1 for slow, quick in zip(digested, plain, strict=True)]
    return ReadTimes(
        bare_ms=median(bare),
        mover_ms=median(times.read_ms for times in plain),
        mover_share=median(shares),
        mover_share_min=min(shares),
        mover_share_max=max(shares),
        digest_cost=median(costs),
        num_bytes=mover.num_bytes,
    )


@contextmanager
def _bare_reader(sender: Sender) -> Iterator[NixlBackend]:
    backend = NixlBackend("bare-reader", sender.new_reader_memory())
    try:
        backend.connect(sender.memory)
        yield backend
    finally:
        backend.close()


@dataclass(frozen=True, slots=True)
class _MoverTimes:
    """A sequence of reads through a mover, in milliseconds."""

    read_ms: float
    """Median time from the end of one read to the end of the next one."""
    total_ms: float
    """Time from the first call to the last answer, including digests."""


class _MoverReader:
    """Reads through a mover that always has another read to do."""

    def __init__(self, sender: Sender, mover: Mover, events: SimpleQueue[MoverEvent]) -> None:
        self._sender = sender
        self._mover = mover
        self._events = events
        self._read_ids = itertools.count()
        self.num_bytes = 0
        """Bytes of the latest read."""

    def read(self, reads: Sequence[list[ReadRange]], *, with_digests: bool) -> _MoverTimes:
        """Carries out the reads, one after the other, and waits for their digests."""
        ends: list[float] = []
        wanted = digested = 0
        started = time.perf_counter()
        for number, ranges in enumerate(reads):
            blocks = [block for r in ranges for block in range(r.local_block, r.local_block + r.count)]
            to_digest = blocks if with_digests else ()
            wanted += len(to_digest)
            incarnation, parts = self._sender.memory.incarnation, self._sender.plan.local_parts
            self._mover.read(next(self._read_ids), incarnation, ranges, to_digest, parts)
            digested += self._wait_for_read(ends) if number else 0
        while len(ends) < len(reads) or digested < wanted:
            digested += self._handle_event(ends)
        total_ms = (time.perf_counter() - started) * 1e3
        return _MoverTimes(median(after - before for before, after in itertools.pairwise(ends)), total_ms)

    def _wait_for_read(self, ends: list[float]) -> int:
        before, digested = len(ends), 0
        while len(ends) == before:
            digested += self._handle_event(ends)
        return digested

    def _handle_event(self, ends: list[float]) -> int:
        """Handles the mover's next event; returns the number of digested blocks."""
        match self._events.get():
            case ReadDone(_, num_bytes):
                self.num_bytes = num_bytes
                ends.append(time.perf_counter() * 1e3)
            case BlocksDigested(_, digests):
                return len(digests)
            case other:
                raise BatonError(f"a read of the benchmark failed: {other}")
        return 0


@contextmanager
def _mover_reader(sender: Sender) -> Iterator[_MoverReader]:
    events: SimpleQueue[MoverEvent] = SimpleQueue()
    memory = sender.new_reader_memory()
    mover = Mover(lambda: NixlBackend("moved-reader", memory), events.put, SystemClock(), digests=block_digests(memory))
    mover.start()
    try:
        mover.connect(sender.memory)
        events.get()
        yield _MoverReader(sender, mover, events)
    finally:
        mover.stop()


def _bare_ms(backend: NixlBackend, sender: Sender, reads: Sequence[list[ReadRange]]) -> float:
    times = []
    for ranges in reads:
        started = time.perf_counter()
        handle = backend.post_read(sender.memory.incarnation, ranges)
        while backend.poll(handle) is not ReadState.DONE:
            pass
        backend.release(handle)
        times.append((time.perf_counter() - started) * 1e3)
    return median(times)


def _send(pipe: Connection, block_bytes: int, num_blocks: int) -> None:
    memory = host_memory(num_blocks, block_bytes)
    backend = NixlBackend("bare-sender", memory)
    pipe.send(PeerMemory.of(memory, "bare-sender", backend.agent_metadata()))
    while not pipe.poll(_PUMP_S):
        backend.pump()
    backend.close()

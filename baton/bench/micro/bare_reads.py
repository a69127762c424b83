"""What NIXL reaches without Baton around it, and what the mover makes of it: two processes, two agents, a loop.

A node's blocks are in nobody's cache when they are read, with all the weights that were read meanwhile. So the loops
take other blocks each time, of memory that no cache holds.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from statistics import median

import numpy as np

from baton.clock import SystemClock
from baton.engine.runner import KVMemory
from baton.errors import BatonError
from baton.runner.blocks.block_digests import block_digests
from kv_transfer.backends.base import PeerMemory, ReadRange, ReadState
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.mover.mover import Mover
from kv_transfer.mover.mover_events import BlocksDigested, MoverEvent, ReadDone

_COLD_BYTES = 256 << 20
"""Of memory on each side: several times what the last cache of any processor holds for one core."""
_ROUNDS = 8
_READS = 12
"""Of each kind in a round."""
_PUMP_S = 0.0005
"""How often the sender calls in. Less often and reads wait for it, more often and it takes the receiver's core."""


def host_memory(num_blocks: int, block_bytes: int) -> KVMemory:
    """Host memory whose pages are there, as those of a running node."""
    owner = np.ones(num_blocks * block_bytes, dtype=np.uint8)
    return KVMemory(owner.ctypes.data, num_blocks, block_bytes, "DRAM", 0, owner)


@dataclass(frozen=True, slots=True)
class Sender:
    """Another process whose memory can be read."""

    memory: PeerMemory
    num_blocks: int
    """Each side has so many."""

    @property
    def block_bytes(self) -> int:
        return self.memory.block_bytes


@contextmanager
def bare_sender(block_bytes: int, num_blocks: int) -> Iterator[Sender]:
    """Another process, over the transports that `UCX_TLS` allows; for reads of up to `num_blocks` blocks."""
    num_blocks *= max(2, _COLD_BYTES // (num_blocks * block_bytes))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, block_bytes, num_blocks), daemon=True)
    process.start()
    try:
        yield Sender(ours.recv(), num_blocks)
    finally:
        ours.send("stop")
        process.join(10)
        if process.is_alive():
            process.kill()


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """Medians over rounds, in milliseconds a read."""

    bare_ms: float
    """From the post to the end, in a bare loop."""
    mover_ms: float
    """From the end of one to the next one's, through a node's mover that always has another."""
    mover_share: float
    """Of the bare loop's bandwidth, reached by the mover: each round against its own, since the machine drifts."""
    digest_cost: float
    """What digests add to the time of that mover, as a share of it without them, until the last one is known; rounds
    against their own, too."""


def read_times(sender: Sender, num_blocks: int) -> ReadTimes:
    """What reads of so many neighbouring blocks take; bare loop, mover and mover with digests take turns."""
    places = itertools.cycle(range(0, sender.num_blocks - num_blocks + 1, num_blocks))
    reads = ([ReadRange(block, block, num_blocks)] for block in places)
    bare: list[float] = []
    plain: list[_Moved] = []
    digested: list[_Moved] = []
    with _bare_reader(sender) as backend, _moved_reader(sender) as moved:
        for number in range(_ROUNDS):
            turn = list(itertools.islice(reads, _READS))
            bare.append(_bare_ms(backend, sender, turn))
            # Who comes second finds the helper's thread asleep, or awake: they take turns, too.
            for with_digests in (False, True) if number % 2 else (True, False):
                (digested if with_digests else plain).append(moved.read(turn, with_digests=with_digests))
    shares = [alone / through.read_ms for alone, through in zip(bare, plain, strict=True)]
    costs = [slow.turn_ms / quick.turn_ms - 1 for slow, quick in zip(digested, plain, strict=True)]
    return ReadTimes(median(bare), median(each.read_ms for each in plain), median(shares), median(costs))


@contextmanager
def _bare_reader(sender: Sender) -> Iterator[NixlBackend]:
    backend = NixlBackend("bare-reader", host_memory(sender.num_blocks, sender.block_bytes))
    try:
        backend.connect(sender.memory)
        yield backend
    finally:
        backend.close()


@dataclass(frozen=True, slots=True)
class _Moved:
    """One turn of a mover, in milliseconds."""

    read_ms: float
    """Median, from the end of one read to the next one's."""
    turn_ms: float
    """From the first call to the last answer, of digests, too."""


class _MovedReader:
    """Reads through a mover that always has another one to do."""

    def __init__(self, sender: Sender, mover: Mover, events: SimpleQueue[MoverEvent]) -> None:
        self._sender = sender
        self._mover = mover
        self._events = events
        self._read_ids = itertools.count()

    def read(self, reads: Sequence[list[ReadRange]], *, with_digests: bool) -> _Moved:
        """One turn."""
        ends: list[float] = []
        wanted = digested = 0
        started = time.perf_counter()
        for number, ranges in enumerate(reads):
            blocks = [block for r in ranges for block in range(r.local_block, r.local_block + r.count)]
            to_digest = blocks if with_digests else ()
            wanted += len(to_digest)
            self._mover.read(next(self._read_ids), self._sender.memory.incarnation, ranges, to_digest)
            digested += self._until_read(ends) if number else 0
        while len(ends) < len(reads) or digested < wanted:
            digested += self._take(ends)
        turn_ms = (time.perf_counter() - started) * 1e3
        return _Moved(median(after - before for before, after in itertools.pairwise(ends)), turn_ms)

    def _until_read(self, ends: list[float]) -> int:
        before, digested = len(ends), 0
        while len(ends) == before:
            digested += self._take(ends)
        return digested

    def _take(self, ends: list[float]) -> int:
        """Take one answer; returns how many blocks were digested."""
        match self._events.get():
            case ReadDone():
                ends.append(time.perf_counter() * 1e3)
            case BlocksDigested(_, digests):
                return len(digests)
            case other:
                raise BatonError(f"a read ended otherwise: {other}")
        return 0


@contextmanager
def _moved_reader(sender: Sender) -> Iterator[_MovedReader]:
    events: SimpleQueue[MoverEvent] = SimpleQueue()
    memory = host_memory(sender.num_blocks, sender.block_bytes)
    mover = Mover(lambda: NixlBackend("moved-reader", memory), events.put, SystemClock(), digests=block_digests(memory))
    mover.start()
    try:
        mover.connect(sender.memory)
        events.get()
        yield _MovedReader(sender, mover, events)
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

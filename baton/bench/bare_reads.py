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
from baton.engine.runner.base import KVMemory
from kv_transfer.backends.base import PeerMemory, ReadRange, ReadState
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.mover import Mover
from kv_transfer.mover_events import MoverEvent

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


def read_times(sender: Sender, num_blocks: int) -> ReadTimes:
    """What reads of so many neighbouring blocks take; bare loop and mover take turns."""
    places = itertools.cycle(range(0, sender.num_blocks - num_blocks + 1, num_blocks))
    reads = ([ReadRange(block, block, num_blocks)] for block in places)
    bare, moved = [], []
    with _bare_reader(sender) as backend, _moved_reader(sender) as (mover, events):
        for number in range(_ROUNDS):
            turn = list(itertools.islice(reads, _READS))
            bare.append(_bare_ms(backend, sender, turn))
            moved.append(_moved_ms(mover, events, sender, turn, number * _READS))
    shares = [alone / through for alone, through in zip(bare, moved, strict=True)]
    return ReadTimes(median(bare), median(moved), median(shares))


@contextmanager
def _bare_reader(sender: Sender) -> Iterator[NixlBackend]:
    backend = NixlBackend("bare-reader", host_memory(sender.num_blocks, sender.block_bytes))
    backend.connect(sender.memory)
    yield backend
    backend.close()


@contextmanager
def _moved_reader(sender: Sender) -> Iterator[tuple[Mover, SimpleQueue[MoverEvent]]]:
    events: SimpleQueue[MoverEvent] = SimpleQueue()
    memory = host_memory(sender.num_blocks, sender.block_bytes)
    mover = Mover(lambda: NixlBackend("moved-reader", memory), events.put, SystemClock())
    mover.start()
    mover.connect(sender.memory)
    events.get()
    yield mover, events
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


def _moved_ms(
    mover: Mover, events: SimpleQueue[MoverEvent], sender: Sender, reads: Sequence[list[ReadRange]], first_id: int
) -> float:
    ends = []
    for number, ranges in enumerate(reads):
        mover.read(first_id + number, sender.memory.incarnation, ranges)
        if number:
            events.get()
            ends.append(time.perf_counter() * 1e3)
    events.get()
    return median(after - before for before, after in itertools.pairwise(ends))


def _send(pipe: Connection, block_bytes: int, num_blocks: int) -> None:
    memory = host_memory(num_blocks, block_bytes)
    backend = NixlBackend("bare-sender", memory)
    pipe.send(PeerMemory.of(memory, "bare-sender", backend.agent_metadata()))
    while not pipe.poll(_PUMP_S):
        backend.pump()
    backend.close()

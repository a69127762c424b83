"""What NIXL reaches without Baton around it: two processes, two agents, the same blocks, a bare loop."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median

import numpy as np

from baton.engine.runner.base import KVMemory
from kv_transfer.backends.base import PeerMemory, ReadRange, ReadState
from kv_transfer.backends.nixl import NixlBackend

_PUMP_S = 0.0005
"""How often the sender calls in. Less often and reads wait for it, more often and it takes the receiver's core."""


def host_memory(num_blocks: int, block_bytes: int) -> KVMemory:
    """Host memory whose pages are there, as those of a running node."""
    owner = np.ones(num_blocks * block_bytes, dtype=np.uint8)
    return KVMemory(owner.ctypes.data, num_blocks, block_bytes, "DRAM", 0, owner)


@contextmanager
def bare_reader(block_bytes: int, num_blocks: int) -> Iterator[BareReader]:
    """A receiver in this process and a sender in another one, over the transports that `UCX_TLS` allows."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=_send, args=(theirs, block_bytes, num_blocks), daemon=True)
    sender.start()
    try:
        peer: PeerMemory = ours.recv()
        reader = BareReader(NixlBackend("bare-reader", host_memory(num_blocks, block_bytes)), peer)
        yield reader
    finally:
        ours.send("stop")
        sender.join(10)
        if sender.is_alive():
            sender.kill()


class BareReader:
    """Reads runs of neighbouring blocks, one read at a time."""

    def __init__(self, backend: NixlBackend, peer: PeerMemory) -> None:
        self._backend = backend
        self._peer = peer
        backend.connect(peer)

    def milliseconds(self, pieces: Sequence[int], repeats: int = 20) -> float:
        """Median time of reading so many blocks, one read for each piece."""
        self._once(pieces)
        return median(self._once(pieces) for _ in range(repeats))

    def _once(self, pieces: Sequence[int]) -> float:
        first, started = 0, time.perf_counter()
        for count in pieces:
            handle = self._backend.post_read(self._peer.incarnation, [ReadRange(first, first, count)])
            while self._backend.poll(handle) is not ReadState.DONE:
                pass
            self._backend.release(handle)
            first += count
        return (time.perf_counter() - started) * 1e3


def _send(pipe: Connection, block_bytes: int, num_blocks: int) -> None:
    memory = host_memory(num_blocks, block_bytes)
    backend = NixlBackend("bare-sender", memory)
    pipe.send(PeerMemory.of(memory, "bare-sender", backend.agent_metadata()))
    while not pipe.poll(_PUMP_S):
        backend.pump()
    backend.close()

"""A NIXL sender in its own process, so that reads are really one-sided and it can be killed or stopped."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from baton.engine.runner import KVMemory
from kv_transfer.backends.base import PeerMemory
from kv_transfer.backends.nixl import NixlBackend

PUMP_INTERVAL_S = 0.001
ANSWER_WITHIN_S = 60.0


def new_memory(num_blocks: int, block_bytes: int) -> tuple[KVMemory, Any]:
    """Zeroed host memory, and the ctypes buffer that it is."""
    buffer = (ctypes.c_char * (num_blocks * block_bytes))()
    return KVMemory(ctypes.addressof(buffer), num_blocks, block_bytes, "DRAM", 0, buffer), buffer


def pattern(block: int, salt: int, block_bytes: int) -> bytes:
    """Return the content of a block of a sender: it differs between blocks and salts, and within a block."""
    line = bytes((block * 7919 + salt * 104729 + i * (block + 31) & 0xFFFF) % 251 for i in range(62))
    tagged = block.to_bytes(3, "little") + salt.to_bytes(1, "little") + line
    return (tagged * (block_bytes // len(tagged) + 1))[:block_bytes]


def fill(buffer: Any, memory: KVMemory, salt: int) -> None:
    """Write the pattern into every block."""
    for block in range(memory.num_blocks):
        address = ctypes.addressof(buffer) + block * memory.block_bytes
        ctypes.memmove(address, pattern(block, salt, memory.block_bytes), memory.block_bytes)


def _serve(pipe: Connection, tls: str | None, incarnation: str, num_blocks: int, block_bytes: int) -> None:
    if tls is not None:
        os.environ["UCX_TLS"] = tls
    memory, buffer = new_memory(num_blocks, block_bytes)
    fill(buffer, memory, salt=1)
    backend = NixlBackend(incarnation, memory)
    pipe.send(PeerMemory.of(memory, incarnation, backend.agent_metadata()))
    pumping = False
    while True:
        if not pipe.poll(PUMP_INTERVAL_S if pumping else None):
            backend.pump()
            continue
        command = pipe.recv()
        if command is None:
            return
        pumping = command
        pipe.send(None)


class Sender:
    """Controls one sender process. `pump(True)` makes it call into its agent every millisecond."""

    def __init__(self, tls: str | None, incarnation: str, num_blocks: int, block_bytes: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "nixl._api"])
        self._pipe, theirs = context.Pipe()
        args = (theirs, tls, incarnation, num_blocks, block_bytes)
        self._process = context.Process(target=_serve, args=args, daemon=True)
        self._process.start()
        theirs.close()
        self.memory: PeerMemory = self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(ANSWER_WITHIN_S):
            raise TimeoutError("the sender does not answer")
        return self._pipe.recv()

    def pump(self, on: bool) -> None:
        self._pipe.send(on)
        self._answer()

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process (SIGKILL) and wait until it is gone. Idempotent."""
        if self._process.is_alive():
            self._signal(signal.SIGKILL)
            self._process.join(ANSWER_WITHIN_S)

    def close(self) -> None:
        self.kill()
        self._pipe.close()

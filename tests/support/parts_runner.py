"""A runner without a model whose KV cache is in parts. All but the first have their mover at the other end of a stream,
as stages in other processes have."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence

import numpy as np

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.runner import KVMemory, RemotePart
from baton.runner.simulated import SimulatedRunner
from baton.runner.spec import SimulatedSpec
from kv_transfer.remote.mover_server import MoverServer

_JOIN_S = 60.0


class PartsRunner(SimulatedRunner):
    """Computes in undivided blocks, which hold what the parts hold."""

    def __init__(self, spec: SimulatedSpec, layers: Sequence[range]) -> None:
        super().__init__(spec)
        whole = super().memory
        self._layers = layers
        self._parts = [np.zeros_like(whole.owner[:, each.start : each.stop], order="C") for each in layers]
        self._memories = [
            KVMemory(
                part.ctypes.data,
                whole.num_blocks,
                self.layout.part(each).block_bytes,
                whole.kind,
                whole.device_id,
                part,
                whole.num_probe_blocks,
                self.layout,
                each,
            )
            for part, each in zip(self._parts, layers, strict=True)
        ]
        self._streams: list[tuple[socket.socket, socket.socket]] = [socket.socketpair() for _ in layers[1:]]
        self.servers = [
            MoverServer(theirs, memory) for (_, theirs), memory in zip(self._streams, self._memories[1:], strict=True)
        ]
        self._threads = [threading.Thread(target=server.serve, daemon=True) for server in self.servers]
        for thread in self._threads:
            thread.start()

    @property
    def memory(self) -> KVMemory:
        return self._memories[0]

    @property
    def remote_parts(self) -> Sequence[RemotePart]:
        return [RemotePart(layers, ours) for layers, (ours, _) in zip(self._layers[1:], self._streams, strict=True)]

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        blocks = self._cache
        for layers, part in zip(self._layers, self._parts, strict=True):
            blocks[:, layers.start : layers.stop] = part[: len(blocks)]
        before = blocks.copy()
        output = super().execute_model(scheduler_output)
        # Reads may write to the others meanwhile.
        written = np.flatnonzero((blocks != before).reshape(len(blocks), -1).any(axis=1))
        for layers, part in zip(self._layers, self._parts, strict=True):
            part[written] = blocks[written, layers.start : layers.stop]
        return output

    def lose(self, part: int) -> None:
        """End the stream of a part, as the end of its process does."""
        self._streams[part - 1][1].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the parts. The node has ended."""
        super().close()
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream[0].shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_JOIN_S)
            assert not thread.is_alive()
        for stream in self._streams:
            for end in stream:
                end.close()

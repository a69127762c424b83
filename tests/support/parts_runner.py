"""Runners without a model whose KV cache is in parts: all in this process, or all but the first at the other end of a
stream, as stages in other processes are."""

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
from kv_transfer.mover.mover_server import MoverServer

_JOIN_S = 60.0


class DividedRunner(SimulatedRunner):
    """Computes in undivided blocks, which hold what the memories of the parts hold."""

    def __init__(self, spec: SimulatedSpec, layers: Sequence[range]) -> None:
        super().__init__(spec)
        whole = self.memory
        self.layers_of_parts = layers
        self._parts = [np.zeros_like(whole.owner[:, each.start : each.stop], order="C") for each in layers]
        self.memories = [
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
        self.memory = self.memories[0]

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        blocks = self._cache
        for layers, part in zip(self.layers_of_parts, self._parts, strict=True):
            blocks[:, layers.start : layers.stop] = part[: len(blocks)]
        before = blocks.copy()
        output = super().execute_model(scheduler_output)
        # Reads may write to the others meanwhile.
        written = np.flatnonzero((blocks != before).reshape(len(blocks), -1).any(axis=1))
        for layers, part in zip(self.layers_of_parts, self._parts, strict=True):
            part[written] = blocks[written, layers.start : layers.stop]
        return output


class PartsRunner(DividedRunner):
    """A divided runner whose parts but the first are served over streams."""

    def __init__(self, spec: SimulatedSpec, layers: Sequence[range]) -> None:
        super().__init__(spec, layers)
        self._streams: list[tuple[socket.socket, socket.socket]] = [socket.socketpair() for _ in layers[1:]]
        served = zip(self._streams, self.memories[1:], strict=True)
        self._threads = [
            threading.Thread(target=MoverServer(theirs, memory).serve, daemon=True) for (_, theirs), memory in served
        ]
        for thread in self._threads:
            thread.start()

    @property
    def remote_parts(self) -> Sequence[RemotePart]:
        others = zip(self.layers_of_parts[1:], self._streams, strict=True)
        return [RemotePart(layers, ours) for layers, (ours, _) in others]

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

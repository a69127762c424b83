"""The transformer of the first of several stages with memories of their own.

The numbers of a micro-batch go to all stages at once, its rows from stage to stage. They pass through the first stage,
which alone has connections.
"""

from __future__ import annotations

import select
import socket
from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.backends.operations import Operations
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.transformer import HiddenAndLogits, on_host
from baton.runner.model.weights import LoadedModel
from baton.runner.ranks.micro_batch import MicroBatch, Task, write_numbers
from baton.runner.ranks.pipelined_transformer import PipelinedTransformer
from baton.runner.remote_stages.first_stage import FirstStage
from baton.runner.remote_stages.frames import FrameKind
from baton.runner.remote_stages.rows import bytes_of, tensor_of
from baton.runner.spec import CacheSpec

_MICRO_BATCHES_OF_A_STAGE = 2
"""One that a stage computes, and one that waits for it."""


class LeadingStage(PipelinedTransformer):
    """The first stage's part of the model, and the KV cache of its layers."""

    def __init__(
        self,
        model: LoadedModel,
        operations: Operations,
        block_size: int,
        cache: CacheSpec,
        num_threads: int,
        stages: FirstStage,
    ) -> None:
        """`stages`: the caller closes it. They must be loading this model already."""
        self._stages = stages
        self._begun: deque[MicroBatch] = deque()
        """Micro-batches that have begun and not ended."""
        super().__init__(model, operations, block_size, cache, num_threads, stages)

    @property
    def can_begin(self) -> bool:
        return len(self._begun) < _MICRO_BATCHES_OF_A_STAGE * self.stage.count

    def begin(self, task: Task, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None) -> None:
        micro = MicroBatch(task, batch, logits_rows)
        self._stages.send_all(FrameKind.NUMBERS, _numbers_of(micro))
        try:
            out = self.compute_stage(batch, logits_rows, None, wants_hidden=False)
            self._stages.send(1, FrameKind.ROWS, bytes_of(out.hidden))
        except Exception as error:
            # The other stages wait for the rows, and would take the next micro-batch's for them.
            self._stages.lose(f"the first stage failed in a step: {error!r}")
            raise RankLost(f"the step can't be computed: {self._stages.why_lost}") from error
        self._begun.append(micro)

    def wait(self, other: socket.socket | None = None, timeout: float | None = None) -> bool:
        poll, own = select.poll(), self._stages.news.fileno()
        poll.register(own, select.POLLIN)
        if other is not None:
            poll.register(other, select.POLLIN)
        return any(descriptor == own for descriptor, _ in poll.poll(None if timeout is None else timeout * 1e3))

    def end(self) -> HiddenAndLogits:
        micro, results = self._begun.popleft(), self._stages.take_results()
        num_hidden = micro.num_results if micro.task is Task.LOGITS_AND_HIDDEN else 0
        of_logits = micro.num_results * self.num_logits * torch.float32.itemsize
        try:
            logits = tensor_of(memoryview(results)[:of_logits], torch.float32, micro.num_results, self.num_logits)
            hidden = tensor_of(memoryview(results)[of_logits:], self.dtype, num_hidden, self.embedding_size)
        except ValueError as error:
            self._stages.lose(f"the last stage sent other results than those of its micro-batch: {error}")
            raise RankLost(self._stages.why_lost) from error
        return HiddenAndLogits(on_host(hidden), on_host(logits))

    def set_rows_per_call(self, rows: int) -> None:
        super().set_rows_per_call(rows)
        self._stages.send_all(FrameKind.ROWS_PER_CALL, rows.to_bytes(8, "little"))

    def clear_blocks(self, count: int) -> None:
        super().clear_blocks(count)
        self._stages.send_all(FrameKind.CLEAR, count.to_bytes(8, "little"))


def _numbers_of(micro: MicroBatch) -> bytearray:
    numbers = bytearray()

    def memory_of(size: int) -> npt.NDArray[np.uint8]:
        numbers.extend(bytes(size))
        return np.frombuffer(numbers, np.uint8)

    write_numbers(micro, memory_of)
    return numbers

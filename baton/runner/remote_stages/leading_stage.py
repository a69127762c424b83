"""The transformer of the last of several stages with KV caches of their own, which leads the others.

The numbers of a micro-batch go to all stages at once, and its rows from stage to stage. They pass through this process,
which alone has connections.
"""

from __future__ import annotations

import socket
from collections import deque

import numpy as np
import numpy.typing as npt

from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.backends.operations import Operations
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.cached_model import on_host
from baton.runner.model.transformer import HiddenAndLogits
from baton.runner.model.weights import LoadedModel
from baton.runner.ranks.group_files import wait_until_readable
from baton.runner.ranks.micro_batch import MicroBatch, Task, tensor_of, write_numbers
from baton.runner.ranks.rank_leader import PipelinedTransformer
from baton.runner.remote_stages.frames import FrameKind
from baton.runner.remote_stages.stage_leader import StageLeader
from baton.runner.spec import CacheSpec

_MICRO_BATCHES_OF_A_STAGE = 2
"""One that a stage computes, and one that waits for it."""


class LeadingStage(PipelinedTransformer):
    """The last stage's part of the model, and the KV cache of its layers."""

    def __init__(
        self,
        model: LoadedModel,
        operations: Operations,
        block_size: int,
        cache: CacheSpec,
        num_threads: int,
        others: StageLeader,
    ) -> None:
        """`others`: the caller closes them. They must be loading this model already."""
        self._others = others
        self._begun: deque[MicroBatch] = deque()
        """Micro-batches that have begun and not ended."""
        super().__init__(model, operations, block_size, cache, num_threads, others)

    @property
    def can_begin(self) -> bool:
        return len(self._begun) < _MICRO_BATCHES_OF_A_STAGE * self.stage.count

    def begin(self, task: Task, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None) -> None:
        micro = MicroBatch(task, batch, logits_rows)
        self._others.begin(_numbers_of(micro))
        self._begun.append(micro)

    def wait(self, other: socket.socket | None = None, timeout: float | None = None) -> bool:
        return wait_until_readable(self._others.news, other, timeout)

    def end(self) -> HiddenAndLogits:
        micro, payload = self._begun.popleft(), self._others.take_rows()
        wants_hidden = micro.task is Task.LOGITS_AND_HIDDEN
        try:
            rows = tensor_of(payload, self.dtype, micro.batch.token_ids.size, self.width).to(self.device)
            out = self.compute_stage(micro.batch, micro.logits_rows, rows, wants_hidden)
        except Exception as error:
            # What the other stages have computed behind this micro-batch would be taken for the next one's.
            self._others.lose(f"the last stage failed in a step: {error!r}")
            raise RankLost(f"the step can't be computed: {self._others.why_lost}") from error
        hidden = out.hidden if wants_hidden else out.hidden[:0]
        return HiddenAndLogits(on_host(hidden), on_host(out.logits))

    def set_rows_per_call(self, rows: int) -> None:
        super().set_rows_per_call(rows)
        self._others.send_all(FrameKind.ROWS_PER_CALL, rows.to_bytes(8, "little"))

    def clear_blocks(self, count: int) -> None:
        super().clear_blocks(count)
        self._others.send_all(FrameKind.CLEAR, count.to_bytes(8, "little"))


def _numbers_of(micro: MicroBatch) -> bytearray:
    numbers = bytearray()

    def memory_of(size: int) -> npt.NDArray[np.uint8]:
        numbers.extend(bytes(size))
        return np.frombuffer(numbers, np.uint8)

    write_numbers(micro, memory_of)
    return numbers

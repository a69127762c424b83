"""The transformer of the last of several stages, which leads the others.

The numbers of a micro-batch go to all stages at once, and its rows from stage to stage. They pass through this process,
which alone has connections. Several micro-batches are computed at once, each at another stage.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.backends.operations import Operations
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.cached_model import on_host
from baton.runner.model.decoder import HiddenAndLogits
from baton.runner.model.weights import LoadedModel
from baton.runner.ranks.micro_batch import MicroBatch, tensor_of, write_numbers
from baton.runner.ranks.rank import FirstRank, LeadingTransformer
from baton.runner.stage_spec import StageSpec
from baton.runner.stages.frames import FrameKind
from baton.runner.stages.stage_leader import StageLeader

_MICRO_BATCHES_OF_A_STAGE = 2
"""One that a stage computes, and one that waits for it."""


@dataclass(frozen=True, slots=True)
class _Begun:
    micro: MicroBatch
    wants_hidden: bool


class LeadingStage(LeadingTransformer):
    """The last stage's part of the model, and the KV cache of its layers. Micro-batches begin and end in one order.

    Its methods raise RankLost once a process that computes beside this one has ended.
    """

    def __init__(
        self,
        model: LoadedModel,
        operations: Operations,
        spec: StageSpec,
        others: StageLeader,
        first_rank: FirstRank | None,
    ) -> None:
        """`others`: the caller closes them. They must be loading this model already."""
        self._others = others
        self._begun: deque[_Begun] = deque()
        """Micro-batches that have begun and not ended."""
        super().__init__(model, operations, spec, others, first_rank)

    @property
    def can_begin(self) -> bool:
        """Whether one more micro-batch may begin."""
        return len(self._begun) < _MICRO_BATCHES_OF_A_STAGE * self.stage.count

    def begin(self, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None, wants_hidden: bool) -> None:
        """Begin with a micro-batch, which the stages compute one behind the other. Call it if `can_begin`."""
        micro = MicroBatch(batch, logits_rows)
        self._others.begin(_numbers_of(micro))
        self._begun.append(_Begun(micro, wants_hidden))

    def wait(self, other: socket.socket | None = None, timeout: float | None = None) -> bool:
        """Wait until `take_result` would return at once, or `other` can be read; returns whether it would.

        `timeout`: the most seconds to wait.
        """
        poll, news = select.poll(), self._others.news.fileno()
        poll.register(news, select.POLLIN)
        if other is not None:
            poll.register(other, select.POLLIN)
        return any(readable == news for readable, _ in poll.poll(None if timeout is None else timeout * 1e3))

    def take_result(self) -> HiddenAndLogits:
        """Wait for the micro-batch that has begun first, and compute this stage's part of it.

        Returns hidden states only if they are wanted. The results are valid until the next call.
        """
        begun, payload = self._begun.popleft(), self._others.take_rows()
        micro = begun.micro
        try:
            rows = tensor_of(payload, self.sent_dtype, micro.batch.token_ids.size, self.sent_width).to(self.device)
            out = self.compute_stage(micro.batch, micro.logits_rows, rows, begun.wants_hidden)
        except Exception as error:
            # What the other stages have computed behind this micro-batch would be taken for the next one's.
            self._others.declare_lost(f"the last stage failed in a step: {error!r}")
            raise RankLost(f"the step can't be computed: {self._others.why_lost}") from error
        hidden = out.hidden if begun.wants_hidden else out.hidden[:0]
        return HiddenAndLogits(on_host(hidden), on_host(out.logits))

    def compute(self, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        self.begin(batch, logits_rows, wants_hidden=False)
        return self.take_result().logits.copy()

    def compute_with_hidden(
        self, batch: FlatBatch, rows: npt.NDArray[np.int64] | None = None, num_logits: int | None = None
    ) -> HiddenAndLogits:
        self.begin(batch, rows, wants_hidden=True)
        computed = self.take_result()
        return HiddenAndLogits(computed.hidden.copy(), computed.logits.copy())

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

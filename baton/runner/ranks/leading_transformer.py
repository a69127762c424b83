"""The transformer of the first rank: it announces what it computes, so that all ranks compute it together.

The KV cache is one memory of all ranks, so the first one alone copies blocks and moves them, while none computes.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from baton.runner.backends.cpu.kernels.barrier import BarrierTag
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.cached_model import on_host
from baton.runner.model.decoder import ModelOutput
from baton.runner.model.transformer import HiddenAndLogits
from baton.runner.model.weights import LoadedModel
from baton.runner.ranks.following_ranks import FollowingRanks
from baton.runner.ranks.micro_batch import MicroBatch, Task
from baton.runner.ranks.micro_batch_slot import MicroBatchSlot
from baton.runner.ranks.pipelined_transformer import PipelinedTransformer
from baton.runner.ranks.rank_parts import RankParts
from baton.runner.ranks.rank_spec import RankSpec
from baton.runner.ranks.stage_part import compute_part, results_in
from baton.runner.ranks.stage_ring import StageRing


class LeadingTransformer(PipelinedTransformer):
    """The first rank's part of the model, and the KV cache of all ranks."""

    def __init__(
        self, model: LoadedModel, spec: RankSpec, parts: RankParts, ring: StageRing, followers: FollowingRanks
    ) -> None:
        """`ring`: the first stage's place in it; the caller closes it."""
        self._parts = parts
        self._followers = followers
        self._ring = ring
        self._begun: deque[tuple[MicroBatchSlot, MicroBatch, ModelOutput]] = deque()
        """Micro-batches that have begun and not ended: what the first stage has computed of each."""
        try:
            super().__init__(model, parts.operations, spec.block_size, spec.cache, spec.least_threads, parts.stages)
        except RankLost as error:
            raise RankLost(followers.why_lost or str(error)) from error

    @property
    def can_begin(self) -> bool:
        return len(self._begun) < len(self._parts.slots)

    def begin(self, task: Task, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None) -> None:
        parts, micro = self._parts, MicroBatch(task, batch, logits_rows)
        with self._losing_all_on_failure():
            slot = parts.slots.next()
            slot.trim()
            slot.write(micro)
            parts.ranks.barrier.wait(BarrierTag.STEP)
            out = compute_part(self, parts.shard, slot, micro)
            parts.ranks.barrier.wait(BarrierTag.DONE)
            parts.ranks.trim()
            if self.stage.count > 1:
                self._ring.send()
            self._begun.append((slot, micro, out))

    def wait(self, other: socket.socket | None = None, timeout: float | None = None) -> bool:
        return self.stage.count == 1 or self._ring.wait(other, timeout)

    def end(self) -> HiddenAndLogits:
        slot, micro, out = self._begun.popleft()
        if self.stage.count > 1:
            with self._losing_all_on_failure():
                self._ring.receive()
            out = results_in(self, slot, micro)
        hidden = out.hidden if micro.task is Task.LOGITS_AND_HIDDEN else out.hidden[:0]
        return HiddenAndLogits(on_host(hidden), on_host(out.logits))

    @contextmanager
    def _losing_all_on_failure(self) -> Iterator[None]:
        """Lose all ranks if the body fails, which computes with them; raises RankLost."""
        try:
            yield
        except BaseException as error:
            # The other ranks are in the middle of the step, and would take the next one's numbers for this one's.
            self._followers.lose(f"the first rank failed in a step: {error!r}")
            if isinstance(error, Exception):
                raise RankLost(f"the step can't be computed: {self._followers.why_lost or repr(error)}") from error
            raise

"""The transformer of the first rank: it announces what it computes, so that all ranks compute it together.

The KV cache is one memory of all ranks, so the first one alone copies blocks and moves them, between two steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.runner.backends.operations import Operations
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.transformer import HiddenAndLogits, Transformer
from baton.runner.model.weights import LoadedModel
from baton.runner.ranks.step_board import StepBoard, Task, arrays_of
from baton.runner.spec import CacheSpec


class LeadingTransformer(Transformer):
    """The first rank's part of the model, and the KV cache. Raises RankLost once another rank has ended."""

    def __init__(
        self,
        model: LoadedModel,
        operations: Operations,
        block_size: int,
        cache: CacheSpec,
        num_threads: int,
        board: StepBoard,
    ) -> None:
        super().__init__(model, operations, block_size, cache, num_threads)
        self._board = board

    def compute(self, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        self._board.announce(Task.LOGITS, arrays_of(batch, logits_rows))
        logits = super().compute(batch, logits_rows)
        self._board.done()
        return logits

    def compute_with_hidden(
        self, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None = None
    ) -> HiddenAndLogits:
        self._board.announce(Task.LOGITS_AND_HIDDEN, arrays_of(batch, logits_rows))
        computed = super().compute_with_hidden(batch, logits_rows)
        self._board.done()
        return computed

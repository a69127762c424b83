"""The transformer of the first rank: it announces what it computes, so that all ranks compute it together.

The KV cache is one memory of all ranks, so the first one alone copies blocks and moves them, between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.backends.sharded.sharded_operations import ShardedOperations
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.transformer import HiddenAndLogits, Transformer
from baton.runner.model.weights import LoadedModel
from baton.runner.ranks.following_ranks import FollowingRanks
from baton.runner.ranks.step_board import StepBoard, Task, arrays_of
from baton.runner.spec import CacheSpec


class LeadingTransformer(Transformer):
    """The first rank's part of the model, and the KV cache. Raises RankLost once another rank has ended."""

    def __init__(
        self,
        model: LoadedModel,
        operations: ShardedOperations,
        block_size: int,
        cache: CacheSpec,
        num_threads: int,
        board: StepBoard,
        followers: FollowingRanks,
    ) -> None:
        self._ranks = operations.ranks
        self._board = board
        self._followers = followers
        try:
            super().__init__(model, operations, block_size, cache, num_threads)
        except RankLost as error:
            raise RankLost(followers.why_lost or str(error)) from error

    def compute(self, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        with self._all_ranks(Task.LOGITS, batch, logits_rows):
            return super().compute(batch, logits_rows)

    def compute_with_hidden(
        self, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None = None
    ) -> HiddenAndLogits:
        with self._all_ranks(Task.LOGITS_AND_HIDDEN, batch, logits_rows):
            return super().compute_with_hidden(batch, logits_rows)

    @contextmanager
    def _all_ranks(self, task: Task, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None) -> Iterator[None]:
        """Have all ranks compute a step, of which this one's part is computed in the body; it is done at the end."""
        try:
            self._board.announce(task, arrays_of(batch, logits_rows))
            yield
            self._board.done()
            self._ranks.trim()
        except BaseException as error:
            # The other ranks are in the middle of the step, and would take the next one's numbers for this one's.
            self._followers.lose(f"the first rank failed in a step: {error!r}")
            if isinstance(error, Exception):
                raise RankLost(f"the step can't be computed: {self._followers.why_lost or error!r}") from error
            raise

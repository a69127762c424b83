"""A transformer whose layers are computed in stages, several micro-batches at once, each at another stage."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.transformer import HiddenAndLogits, Transformer
from baton.runner.ranks.micro_batch import Task


class PipelinedTransformer(Transformer, ABC):
    """The stage in the node's process, which leads the others. Micro-batches begin and end in the same order.

    Its methods raise RankLost once a process that computes beside this one has ended.
    """

    @property
    @abstractmethod
    def can_begin(self) -> bool:
        """Whether one more micro-batch may begin."""

    @abstractmethod
    def begin(self, task: Task, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None) -> None:
        """Begin with a micro-batch, which the stages compute one behind the other. Call it if `can_begin`."""

    @abstractmethod
    def wait(self, other: socket.socket | None = None, timeout: float | None = None) -> bool:
        """Wait until `end` would return at once, or `other` can be read; returns whether `end` would."""

    @abstractmethod
    def end(self) -> HiddenAndLogits:
        """Wait for the micro-batch that has begun first; returns hidden states only if its task has them.

        With several stages the results are valid until as many micro-batches have begun as may be computed at once.
        """

    def compute(self, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        self.begin(Task.LOGITS, batch, logits_rows)
        logits = self.end().logits
        return logits.copy() if self.stage.count > 1 else logits

    def compute_with_hidden(
        self, batch: FlatBatch, rows: npt.NDArray[np.int64] | None = None, num_logits: int | None = None
    ) -> HiddenAndLogits:
        self.begin(Task.LOGITS_AND_HIDDEN, batch, rows)
        computed = self.end()
        if self.stage.count > 1:
            return HiddenAndLogits(computed.hidden.copy(), computed.logits.copy())
        return computed

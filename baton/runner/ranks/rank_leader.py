"""What leads the processes that compute beside a runner's own, these, and the transformer of the leading stage.

A transformer in stages computes several micro-batches at once, each at another stage.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.engine.batch import SchedulerOutput
from baton.engine.runner import RemotePart
from baton.messages.node_report import RankReport
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.transformer import HiddenAndLogits, Transformer
from baton.runner.ranks.micro_batch import Task


class FollowingRanks(Protocol):
    """The ranks behind the first one, as `RankGroup` runs them in processes."""

    @property
    def pids(self) -> Sequence[int]:
        """Their process ids, in order; empty if they are no processes."""
        ...

    @property
    def why_lost(self) -> str:
        """Why the ranks are lost; empty while they are not."""
        ...

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason once the ranks are lost, from any thread, or now if they are lost.

        It replaces the callback that was given before.
        """
        ...

    def lose(self, reason: str) -> None:
        """Lose the ranks: no step can be computed any more. Only the first reason counts."""
        ...

    def close(self) -> None:
        """End the ranks, and wait for them; idempotent."""
        ...


class RankLeader(Protocol):
    """Leads the other ranks or stages of a model until `close`."""

    @property
    def followers(self) -> FollowingRanks:
        """The ranks or stages that it leads."""
        ...

    @property
    def remote_parts(self) -> Sequence[RemotePart]:
        """The parts of the KV cache that the others have; empty if they share one."""
        ...

    def rank_reports(self) -> Sequence[RankReport]:
        """Reports on this process and the others, in order; empty if they are no processes."""
        ...

    def announce_copies(self, decided: SchedulerOutput) -> None:
        """Make those with parts of the KV cache copy the blocks that a step copies. None may be computing."""
        ...

    def await_copies(self) -> None:
        """Wait until they have made the copies that were announced last: then blocks may be used otherwise."""
        ...

    def end_ranks(self) -> None:
        """End the others, and with RankLost a step that is being computed; idempotent."""
        ...

    def close(self) -> None:
        """End the others, and close what they shared; idempotent. No step may be computed now."""
        ...


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

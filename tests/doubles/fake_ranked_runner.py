"""The simulated runner as if several ranks computed it, of which one can be lost before, in and after a step."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.runner import RunnerLost
from baton.messages.node_model import NodeShape
from baton.runner import SimulatedSpec
from baton.runner.simulated import SimulatedRunner


class LossMoment(enum.Enum):
    """When a rank is lost, beside a step."""

    BEFORE = "before"
    IN = "in"
    """The rank and the stages behind its own have stored none of the step's KV, and the others all of it."""
    AFTER = "after"
    """The step's result is right and nobody has taken it yet."""


@dataclass(slots=True)
class _Loss:
    """A loss that is to come."""

    num_steps: int
    """The number of computing steps before the one that it strikes."""
    moment: LossMoment
    rank: int
    reason: str


class FakeRankedRunner(SimulatedRunner):
    """A runner whose ranks are lost when a test says so; until then it computes as `SimulatedRunner`."""

    def __init__(
        self,
        spec: SimulatedSpec,
        shape: NodeShape,
        call_later: Callable[[Callable[[], None]], None] = lambda call: call(),
    ) -> None:
        """`call_later` calls a function as a thread of its own would, now or later."""
        super().__init__(spec)
        self.shape = shape
        self.why_lost = ""
        """Why the ranks are lost; empty while they are not."""
        self.num_computing_steps = 0
        self._call_later = call_later
        self._callback: Callable[[str], None] | None = None
        self._next_loss: _Loss | None = None
        self._hanging_rank: int | None = None
        """The rank for which a step waited when the ranks were lost."""
        self._is_closed = False

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason once the ranks are lost, or now if they are lost."""
        self._callback = callback
        if self.why_lost:
            callback(self.why_lost)

    def close(self) -> None:
        """End the ranks; a later loss is none."""
        self._is_closed = True

    def lose(self, reason: str, hanging_rank: int | None = None) -> None:
        """Lose the ranks. Only the first reason counts. `hanging_rank`: the next step was waiting for this rank."""
        if self._is_closed or self.why_lost:
            return
        self.why_lost, self._hanging_rank = reason, hanging_rank
        if self._callback is not None:
            callback = self._callback
            self._call_later(lambda: callback(reason))

    def lose_at_step(self, num_steps: int, moment: LossMoment, rank: int, reason: str) -> None:
        """Lose the ranks beside the computing step before which `num_steps` others come."""
        self._next_loss = _Loss(num_steps, moment, rank, reason)

    def disarm(self) -> None:
        """Forget a loss that is to come."""
        self._next_loss = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. Raises RunnerLost, except from a step that computes nothing, which needs no other rank."""
        if scheduler_output.is_empty:
            return super().execute_model(scheduler_output)
        loss = self._loss_of_this_step()
        if loss is not None and loss.moment is LossMoment.BEFORE:
            self.lose(loss.reason)
        broken, self._hanging_rank = self._hanging_rank, None
        if loss is not None and loss.moment is LossMoment.IN and not self.why_lost:
            broken = loss.rank
            self.lose(loss.reason)
        if broken is not None:
            self._compute_without(broken, scheduler_output)
        if self.why_lost:
            raise RunnerLost(f"the step can't be computed: {self.why_lost}")
        self.num_computing_steps += 1
        computed = super().execute_model(scheduler_output)
        if loss is not None:
            self.lose(loss.reason)
        return computed

    def _loss_of_this_step(self) -> _Loss | None:
        loss = self._next_loss
        if loss is None:
            return None
        if loss.num_steps:
            loss.num_steps -= 1
            return None
        self._next_loss = None
        return loss

    def _compute_without(self, rank: int, scheduler_output: SchedulerOutput) -> None:
        """Compute a step of which this rank's part is missing, and the parts of all stages behind its own."""
        stage, place = divmod(rank, self.shape.tp)
        # [blocks, layers, keys and values, heads, tokens, bytes]
        cache, before = self._cache, self._cache.copy()
        super().execute_model(scheduler_output)
        layers = np.array_split(np.arange(cache.shape[1]), self.shape.pp)
        heads = np.array_split(np.arange(cache.shape[3]), self.shape.tp)
        for layer in layers[stage]:
            cache[:, layer, :, heads[place]] = before[:, layer, :, heads[place]]
        for behind in layers[stage + 1 :]:
            cache[:, behind] = before[:, behind]

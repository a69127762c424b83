"""The node's latest engine steps, kept in memory for `Node.Trace`: what a timeline is drawn of."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from baton.rpc.messages import StepFigures, TraceStep


class StepLog:
    """A bounded ring, oldest dropped first. Lives on the loop."""

    def __init__(self, capacity: int = 16_384) -> None:
        self._steps: deque[TraceStep] = deque(maxlen=capacity)
        self._num_steps = 0

    def record(self, ended_s: float, figures: StepFigures, goes_on: bool) -> None:
        """A step was committed then, by CLOCK_MONOTONIC; `goes_on`: there was more to compute."""
        self._num_steps += 1
        self._steps.append(TraceStep(self._num_steps, int(ended_s * 1e9), figures, goes_on))

    def after(self, seq: int) -> Sequence[TraceStep]:
        """Kept steps with a number above `seq`, oldest first."""
        num_new = min(len(self._steps), max(0, self._num_steps - seq))
        return list(islice(self._steps, len(self._steps) - num_new, None))

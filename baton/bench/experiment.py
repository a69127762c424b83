"""What the experiments on real clusters (`compare`, `validate`) have in common: their time, and where they report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.clock import Clock

Report = Callable[[str], None]
"""Shows a line of progress."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """The frame of an experiment."""

    report: Report
    clock: Clock
    deadline_s: float
    """When the last run must have ended, on the clock."""

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline_s - self.clock.monotonic()

"""Time as an argument: decisions never read a clock of their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from. Both readings are in seconds."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary origin that is one and the same for all processes of a host; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch; for people only, never for a decision."""
        ...


class SystemClock:
    """The machine's clocks (CLOCK_MONOTONIC and the wall clock)."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that a test moves by hand."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move time forward; negative steps raise ValueError."""
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += seconds

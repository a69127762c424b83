"""Clocks, which are passed as arguments so that tests and simulations control the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. Both readings are in seconds."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary origin that all processes of a host share; never decreases."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, to be shown to people; never used for a decision, since it may jump."""
        ...


class SystemClock:
    """The machine's clocks (CLOCK_MONOTONIC and the wall clock)."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

"""The fake of `baton.clock.Clock`."""

from __future__ import annotations


class FakeClock:
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

"""The fake of `baton.clock.Clock`."""

from __future__ import annotations


class FakeClock:
    """A clock that shows the time to which a test has set it, in seconds."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time forward. Raises ValueError for a negative number of seconds."""
        if seconds < 0:
            raise ValueError(f"the time can't be moved back, by {seconds} s")
        self._now += seconds

    def set_back(self, seconds: float) -> None:
        """Show an earlier time, as a server's clock may that was set."""
        self._now -= seconds

"""The highest rate at which a service level is kept, by bisection. Pure: it says what to try, and is told what came."""

from __future__ import annotations

import math


class GoodputSearch:
    """Rates that double (or halve) until one is kept and one is not, then the geometric middle between the two."""

    def __init__(self, first_rate: float, tolerance: float = 0.1, most_tries: int = 8) -> None:
        """`tolerance`: how much higher the lowest rate that failed may be in the end; 0.1 is a tenth."""
        self._rate = first_rate
        self._tolerance = tolerance
        self._tries_left = most_tries
        self._kept = 0.0
        self._broken = math.inf

    @property
    def is_over(self) -> bool:
        """Nothing more to try."""
        return self._tries_left <= 0 or (self._kept > 0 and self._broken <= self._kept * (1 + self._tolerance))

    @property
    def rate(self) -> float:
        """The next one to try."""
        return self._rate

    @property
    def goodput(self) -> float:
        """The highest rate that was kept, 0 if none was."""
        return self._kept

    @property
    def bound(self) -> float:
        """The lowest rate that was not kept; infinity if all were."""
        return self._broken

    def tried(self, is_kept: bool) -> None:
        """What came of the rate."""
        self._tries_left -= 1
        if is_kept:
            # Kept above what was not kept: load is random, and the later word counts.
            self._kept = max(self._kept, self._rate)
            self._broken = math.inf if self._broken <= self._kept else self._broken
        else:
            self._broken = min(self._broken, self._rate)
        self._rate = self._next()

    def _next(self) -> float:
        if self._broken == math.inf:
            return self._kept * 2
        if self._kept == 0:
            return self._broken / 2
        return math.sqrt(self._kept * self._broken)

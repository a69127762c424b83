"""The highest rate at which a service level is kept, by bisection, live or simulated. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


class GoodputSearch:
    """Says what rate to try, and is told what came: rates that rise (or fall) by `step` until one is kept and one is
    not, then the geometric middle between the two."""

    def __init__(
        self,
        first_rate: float,
        tolerance: float = 0.1,
        most_tries: int = 8,
        lowest: float = 0.0,
        highest: float = math.inf,
        step: float = 2.0,
    ) -> None:
        """`tolerance`: how much higher the lowest rate that failed may be in the end; 0.1 is a tenth.

        `step`: from one rate to the next until there are both kinds; little above 1 if the first is a good guess.
        """
        self._rate = first_rate
        self._tolerance = tolerance
        self._tries_left = most_tries
        self._lowest = lowest
        self._highest = highest
        self._step = step
        self._kept = 0.0
        self._broken = math.inf

    @property
    def is_over(self) -> bool:
        """Nothing more to try."""
        if self._tries_left <= 0 or not self._lowest <= self._rate <= self._highest:
            return True
        return self._kept > 0 and self._broken <= self._kept * (1 + self._tolerance)

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
            return self._kept * self._step
        if self._kept == 0:
            return self._broken / self._step
        return math.sqrt(self._kept * self._broken)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests per second."""

    rate: float
    """0: not even the lowest one that was tried is kept."""
    next_rate: float
    """The lowest one that was tried and was not, or that would have been next."""
    attainment: float
    """At `rate`."""


def find_goodput(
    attainment_at: Callable[[float], float], start: float, target: float, tolerance: float = 0.03
) -> Goodput:
    """`attainment_at` a rate is a share of the requests offered; it is asked some ten times."""
    search = GoodputSearch(start, tolerance, most_tries=64, lowest=start / 64, highest=1e6)
    attainments = {0.0: 0.0}
    while not search.is_over:
        rate = search.rate
        attainments[rate] = attainment_at(rate)
        search.tried(attainments[rate] >= target)
    next_rate = search.rate if math.isinf(search.bound) else search.bound
    return Goodput(search.goodput, next_rate, attainments[search.goodput])

"""Goodput: the highest request rate at which the SLO is met, found by bisection, live or simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


class GoodputSearch:
    """Chooses the rates to measure: they rise (or fall) by the factor `step` until one meets the SLO and one does not,
    then each is the geometric mean of the highest that met it and the lowest that did not."""

    def __init__(
        self,
        first_rate: float,
        tolerance: float = 0.1,
        max_tries: int = 8,
        lowest: float = 0.0,
        highest: float = math.inf,
        step: float = 2.0,
    ) -> None:
        """`tolerance`: the search ends when the lowest rate that failed is at most this share higher than the goodput.

        `step`: the factor between rates until both outcomes were seen; close to 1 if `first_rate` is a good guess.
        """
        self._rate = first_rate
        self._tolerance = tolerance
        self._tries_left = max_tries
        self._lowest = lowest
        self._highest = highest
        self._step = step
        self._met = 0.0
        self._failed = math.inf

    @property
    def is_over(self) -> bool:
        """Whether the search has ended."""
        if self._tries_left <= 0 or not self._lowest <= self._rate <= self._highest:
            return True
        return self._met > 0 and self._failed <= self._met * (1 + self._tolerance)

    @property
    def rate(self) -> float:
        """The next rate to measure."""
        return self._rate

    @property
    def goodput(self) -> float:
        """The highest rate that met the SLO; 0 if none did."""
        return self._met

    @property
    def upper_bound(self) -> float:
        """The lowest rate that did not meet the SLO; infinity if all did."""
        return self._failed

    def add_result(self, is_met: bool) -> None:
        """Says whether `rate` met the SLO, and chooses the next rate."""
        self._tries_left -= 1
        if is_met:
            # A rate may meet the SLO above one that did not, since load is random: the later measurement counts.
            self._met = max(self._met, self._rate)
            self._failed = math.inf if self._failed <= self._met else self._failed
        else:
            self._failed = min(self._failed, self._rate)
        self._rate = self._next()

    def _next(self) -> float:
        if self._failed == math.inf:
            return self._met * self._step
        if self._met == 0:
            return self._failed / self._step
        return math.sqrt(self._met * self._failed)


@dataclass(frozen=True, slots=True)
class Goodput:
    """The result of a search. Rates are requests per second."""

    rate: float
    """0: not even the lowest rate that was tried meets the SLO."""
    next_rate: float
    """The lowest rate that was tried and failed, or the rate that would have been tried next."""
    attainment: float
    """Attainment at `rate`."""


def find_goodput(
    attainment_at: Callable[[float], float], start: float, target: float, tolerance: float = 0.03
) -> Goodput:
    """Searches the highest rate whose attainment is at least `target`.

    `attainment_at` measures a rate and returns the share of offered requests that met the SLO; it is called about ten
    times.
    """
    search = GoodputSearch(start, tolerance, max_tries=64, lowest=start / 64, highest=1e6)
    attainments = {0.0: 0.0}
    while not search.is_over:
        rate = search.rate
        attainments[rate] = attainment_at(rate)
        search.add_result(attainments[rate] >= target)
    next_rate = search.rate if math.isinf(search.upper_bound) else search.upper_bound
    return Goodput(search.goodput, next_rate, attainments[search.goodput])

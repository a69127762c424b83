"""The highest rate at which enough requests keep their service levels: doubling, then halving. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_HIGHEST = 1e6


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests per second."""

    rate: float
    """0: not even the lowest one that was tried is kept."""
    next_rate: float
    """The lowest one that was tried and was not."""
    attainment: float
    """At `rate`."""


def find_goodput(
    attainment_at: Callable[[float], float], start: float, target: float, tolerance: float = 0.03
) -> Goodput:
    """`attainment_at` a rate is a share of the requests offered; it is asked some ten times."""
    low, low_attainment, high = 0.0, 0.0, 0.0
    rate = start
    while high == 0.0 and rate < _HIGHEST:
        attainment = attainment_at(rate)
        if attainment >= target:
            low, low_attainment = rate, attainment
            rate *= 2
        else:
            high = rate
    while low == 0.0 and high > start / 64:
        attainment = attainment_at(high / 2)
        if attainment >= target:
            low, low_attainment = high / 2, attainment
        else:
            high /= 2
    while low and high - low > tolerance * low:
        middle = (low + high) / 2
        attainment = attainment_at(middle)
        if attainment >= target:
            low, low_attainment = middle, attainment
        else:
            high = middle
    return Goodput(low, high or rate, low_attainment)

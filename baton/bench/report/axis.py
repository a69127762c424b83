"""Axes of plots: positions of values, and the ticks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

EXTENT = 1000.0
"""Length of every axis in its plot's own units; the page scales plots to the available space."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled value. On narrow screens only major ticks are shown."""

    value: float
    text: str
    is_major: bool


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`."""

    title: str
    low: float
    high: float
    ticks: tuple[Tick, ...]
    is_logarithmic: bool = False

    def at(self, value: float) -> float:
        """The value's position, from 0 to EXTENT; values outside of the axis are moved to its end."""
        if self.is_logarithmic:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share)) * EXTENT


def linear(title: str, high: float, text: Callable[[float], str], low: float = 0.0, count: int = 5) -> Axis:
    """A linear axis from `low` to at least `high`, with about `count` ticks at round values."""
    high = high if math.isfinite(high) and high > low else low + 1.0
    step = _round_step((high - low) / count)
    last = math.ceil((high - low) / step - 1e-9)
    ticks = tuple(Tick(low + i * step, text(low + i * step), i % 2 == 0) for i in range(last + 1))
    return Axis(title, low, low + last * step, ticks)


def exact(title: str, low: float, high: float, unit: str, count: int = 6) -> Axis:
    """A linear axis from `low` to exactly `high`, with ticks at round values that have as many decimals as needed."""
    high = high if high > low else low + 1.0
    step = _round_step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    values = [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
    decimals = next((digits for digits in range(9) if abs(round(step, digits) - step) < step * 1e-6), 9)
    ticks = (Tick(value, f"{value:,.{decimals}f}\u00a0{unit}", i % 2 == 0) for i, value in enumerate(values))
    return Axis(title, low, high, tuple(ticks))


def logarithmic(title: str, low: float, high: float, text: Callable[[float], str]) -> Axis:
    """A logarithmic axis that contains `low` and `high`, both above 0, with ticks at 1, 2 and 5 times powers of 10."""
    low, high = low / 1.1, high * 1.1
    if high / low < 4:
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    leads = (1, 2, 5) if high / low < 300 else (1,)
    values = [(lead, lead * 10.0**decade) for decade in decades for lead in leads]
    inside = [(lead, value) for lead, value in values if low <= value <= high]
    every = max(1, len(inside) // 5) if len(leads) == 1 else 1
    ticks = (
        Tick(value, text(value), high / low < 30 or (lead == 1 and index % every == 0))
        for index, (lead, value) in enumerate(inside)
    )
    return Axis(title, low, high, tuple(ticks), is_logarithmic=True)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(lead * power for lead in (1, 2, 2.5, 5, 10) if lead * power >= step * (1 - 1e-9))

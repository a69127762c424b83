"""The spread of a repeated measurement: median, tenth and ninetieth percentile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, tenth and ninetieth percentile of repetitions."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(values: Sequence[float], scale: float = 1.0) -> Spread:
        """The spread of at least one value, each multiplied by `scale`."""
        ordered = sorted(value * scale for value in values)
        last = len(ordered) - 1
        return Spread(median(ordered), ordered[round(last * 0.1)], ordered[round(last * 0.9)])

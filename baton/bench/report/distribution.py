"""Distributions of durations as counts in bins, so that plots of a million values are as small as of a thousand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_GROWTH = 1.02
"""Ratio of a bin's upper edge to its lower one: differences below it can't be seen in a plot."""
_LOWEST_MS = 1e-3
_HIGHEST_MS = 1e9

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reached:
    """The share of all values that are at most `at_ms`."""

    at_ms: float
    share: float


@dataclass(frozen=True, slots=True)
class Bar:
    """The share of all values between `low_ms` and `high_ms`."""

    low_ms: float
    high_ms: float
    share: float


class Distribution:
    """Counts by duration in milliseconds. Values are assumed to be uniformly distributed inside a bin."""

    __slots__ = ("_counts", "_edges", "count")

    def __init__(self, edges_ms: Values, counts: Values) -> None:
        """`edges_ms`: rising, above zero, one more than counts; empty bins at both ends are dropped."""
        used = np.flatnonzero(counts)
        first, last = (int(used[0]), int(used[-1])) if used.size else (0, -1)
        self._edges = edges_ms[first : last + 2] if used.size else np.zeros(0)
        self._counts = counts[first : last + 1]
        self.count = round(float(self._counts.sum()))

    @staticmethod
    def of(values_ms: Values) -> Distribution:
        """The distribution of these durations; values that are not finite are left out."""
        values = np.clip(values_ms[np.isfinite(values_ms)], _LOWEST_MS, _HIGHEST_MS)
        if not values.size:
            return Distribution(np.zeros(0), np.zeros(0))
        low = float(values.min()) / _GROWTH**0.5
        bins = np.floor(np.log(values / low) / np.log(_GROWTH)).astype(np.int64)
        counts = np.bincount(np.maximum(bins, 0)).astype(np.float64)
        return Distribution(low * _GROWTH ** np.arange(counts.size + 1), counts)

    def quantile(self, share: float) -> float | None:
        """The quantile in milliseconds; None if there are no values."""
        if not self.count:
            return None
        return float(np.interp(share, self._reached(), self._edges))

    def within(self, limit_ms: float) -> float | None:
        """The share of values that are at most `limit_ms`; None if there are no values."""
        if not self.count:
            return None
        return float(np.interp(limit_ms, self._edges, self._reached()))

    def span(self) -> tuple[float, float] | None:
        """Start of the first and end of the last bin that is not empty, in milliseconds."""
        return (float(self._edges[0]), float(self._edges[-1])) if self.count else None

    def cumulative(self, max_points: int = 200) -> list[Reached]:
        """The cumulative distribution, from a share of 0 to a share of 1."""
        if not self.count:
            return []
        stride = max(1, -(-self._edges.size // max_points))
        places = sorted({*range(0, self._edges.size, stride), self._edges.size - 1})
        reached = self._reached()
        return [Reached(float(self._edges[at]), float(reached[at])) for at in places]

    def bars(self, low_ms: float, high_ms: float, count: int) -> list[Bar]:
        """A histogram of `count` bars of equal width on a logarithmic axis; values outside of it are left out."""
        if not self.count:
            return []
        edges = np.geomspace(low_ms, high_ms, count + 1)
        shares = np.diff(np.interp(edges, self._edges, self._reached()))
        return [Bar(float(edges[i]), float(edges[i + 1]), float(share)) for i, share in enumerate(shares.tolist())]

    def _reached(self) -> Values:
        reached = np.concatenate((np.zeros(1), np.cumsum(self._counts)))
        return np.asarray(reached / reached[-1], dtype=np.float64)


def of_histogram(edges_s: Sequence[float], counts: Sequence[float]) -> Distribution:
    """The distribution of a result file's histogram, with edges in seconds; raises ValueError."""
    edges, numbers = np.asarray(edges_s, np.float64), np.asarray(counts, np.float64)
    if edges.size == numbers.size == 0:
        return Distribution(edges, numbers)
    if edges.ndim != 1 or numbers.ndim != 1 or edges.size != numbers.size + 1:
        raise ValueError("a histogram must have one edge more than counts")
    if not ((edges <= 1e12).all() and (np.diff(edges) > 0).all() and edges[0] >= 0):
        raise ValueError("edges of a histogram must rise and must not be negative")
    if not ((numbers >= 0) & (numbers <= 1e15)).all():
        raise ValueError("counts of a histogram must be numbers that are not negative")
    return Distribution(np.maximum(edges * 1e3, _LOWEST_MS), numbers)

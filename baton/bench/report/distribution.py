"""How often something took how long: counts in bins, so that a million values and a thousand draw alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_GROWTH = 1.02
"""Upper edge of a bin over its lower one, where this module makes bins: as exact as an eye is."""
_LOWEST_MS = 1e-3
_HIGHEST_MS = 1e9

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reached:
    """This share of everything took at most so long."""

    at_ms: float
    share: float


@dataclass(frozen=True, slots=True)
class Bar:
    """This share of everything took between `low_ms` and `high_ms`."""

    low_ms: float
    high_ms: float
    share: float


class Distribution:
    """Counts by duration in milliseconds. Inside a bin values count as spread evenly."""

    __slots__ = ("_counts", "_edges", "count")

    def __init__(self, edges_ms: Values, counts: Values) -> None:
        """`edges_ms`: rising, above zero, one more than there are counts; empty bins at both ends are dropped."""
        used = np.flatnonzero(counts)
        first, last = (int(used[0]), int(used[-1])) if used.size else (0, -1)
        self._edges = edges_ms[first : last + 2] if used.size else np.zeros(0)
        self._counts = counts[first : last + 1]
        self.count = round(float(self._counts.sum()))

    @staticmethod
    def of(values_ms: Values) -> Distribution:
        """Of these durations, as far as they are finite numbers."""
        values = np.clip(values_ms[np.isfinite(values_ms)], _LOWEST_MS, _HIGHEST_MS)
        if not values.size:
            return Distribution(np.zeros(0), np.zeros(0))
        low = float(values.min()) / _GROWTH**0.5
        bins = np.floor(np.log(values / low) / np.log(_GROWTH)).astype(np.int64)
        counts = np.bincount(np.maximum(bins, 0)).astype(np.float64)
        return Distribution(low * _GROWTH ** np.arange(counts.size + 1), counts)

    def quantile(self, share: float) -> float | None:
        """Milliseconds that so large a share stays below; nothing when nothing was counted."""
        if not self.count:
            return None
        return float(np.interp(share, self._reached(), self._edges))

    def within(self, limit_ms: float) -> float | None:
        """The share that took at most that long; nothing when nothing was counted."""
        if not self.count:
            return None
        return float(np.interp(limit_ms, self._edges, self._reached()))

    def span(self) -> tuple[float, float] | None:
        """From the first bin with something in it to the last one, in milliseconds."""
        return (float(self._edges[0]), float(self._edges[-1])) if self.count else None

    def cumulative(self, most: int = 200) -> list[Reached]:
        """At most so many points from a share of 0 to one of 1."""
        if not self.count:
            return []
        stride = max(1, -(-self._edges.size // most))
        places = sorted({*range(0, self._edges.size, stride), self._edges.size - 1})
        reached = self._reached()
        return [Reached(float(self._edges[at]), float(reached[at])) for at in places]

    def bars(self, low_ms: float, high_ms: float, count: int) -> list[Bar]:
        """So many bars of even width on a logarithmic axis; what lies outside is left out."""
        if not self.count:
            return []
        edges = np.geomspace(low_ms, high_ms, count + 1)
        shares = np.diff(np.interp(edges, self._edges, self._reached()))
        return [Bar(float(edges[i]), float(edges[i + 1]), float(share)) for i, share in enumerate(shares.tolist())]

    def _reached(self) -> Values:
        reached = np.concatenate((np.zeros(1), np.cumsum(self._counts)))
        return np.asarray(reached / reached[-1], dtype=np.float64)


def of_histogram(edges_s: Sequence[float], counts: Sequence[float]) -> Distribution:
    """Of bins in seconds, as result files have them; raises ValueError."""
    edges, numbers = np.asarray(edges_s, np.float64), np.asarray(counts, np.float64)
    if edges.size == numbers.size == 0:
        return Distribution(edges, numbers)
    if edges.ndim != 1 or numbers.ndim != 1 or edges.size != numbers.size + 1:
        raise ValueError("a histogram has one edge more than counts")
    if not ((edges <= 1e12).all() and (np.diff(edges) > 0).all() and edges[0] >= 0):
        raise ValueError("edges of a histogram rise and are not below zero")
    if not ((numbers >= 0) & (numbers <= 1e15)).all():
        raise ValueError("counts of a histogram are numbers, none below zero")
    return Distribution(np.maximum(edges * 1e3, _LOWEST_MS), numbers)

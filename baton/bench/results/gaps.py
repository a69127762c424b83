"""Times between tokens, counted in a histogram: hundreds of millions of them in 200 kB, and several can be added up."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LEAST_S, _MOST_S = 1e-6, 1e5
_STEP = 1.001
"""Each bin is a thousandth wider than the one before, so a percentile is right to half of that."""
_BINS = math.ceil(math.log(_MOST_S / _LEAST_S) / math.log(_STEP)) + 1
_BUFFERED = 4096


class Gaps:
    """Mean and deviation are exact, percentiles to 0.05 %."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_BINS, np.int64)
        self._buffer = array("d")
        self._sum = 0.0
        self._squares = 0.0
        self._num = 0
        self._most = 0.0

    def __len__(self) -> int:
        return self._num + len(self._buffer)

    def add(self, gaps_s: Sequence[float] | NDArray[np.float64]) -> None:
        """Count these, in seconds."""
        self._buffer.extend(gaps_s)
        if len(self._buffer) >= _BUFFERED:
            self._flush()

    def merge(self, other: Gaps) -> None:
        """Count another's too."""
        other._flush()
        self._counts += other._counts
        self._sum += other._sum
        self._squares += other._squares
        self._num += other._num
        self._most = max(self._most, other._most)

    def mean(self) -> float:
        """Seconds; 0 of none."""
        self._flush()
        return self._sum / self._num if self._num else 0.0

    def std(self) -> float:
        """Standard deviation of them all, seconds."""
        mean = self.mean()
        return math.sqrt(max(0.0, self._squares / self._num - mean * mean)) if self._num else 0.0

    def largest(self) -> float:
        self._flush()
        return self._most

    def percentile(self, percent: float) -> float:
        """Seconds; of two neighbours the nearer one."""
        self._flush()
        if not self._num:
            return 0.0
        rank = round(percent / 100 * (self._num - 1))
        bin_index = int(np.searchsorted(np.cumsum(self._counts), rank, side="right"))
        return min(_middle(bin_index), self._most)

    def histogram(self, bins_per_decade: int = 20) -> dict[str, list[float]]:
        """For plots: `edges_s`, one more than `counts`."""
        self._flush()
        used = np.flatnonzero(self._counts)
        if not len(used):
            return {"edges_s": [], "counts": []}
        # The first bin's middle is no gap at all, which no logarithmic axis has a place for.
        middles = np.maximum([_middle(int(at)) for at in used], _LEAST_S * _STEP)
        first = math.floor(math.log10(middles[0]) * bins_per_decade)
        last = math.floor(math.log10(middles[-1]) * bins_per_decade) + 1
        edges = [10 ** (at / bins_per_decade) for at in range(first, last + 1)]
        counts, _ = np.histogram(middles, bins=edges, weights=self._counts[used])
        return {"edges_s": edges, "counts": [float(count) for count in counts]}

    def to_bytes(self) -> bytes:
        """What another process's `from_bytes` reads."""
        self._flush()
        used = np.flatnonzero(self._counts)
        head = np.array([self._sum, self._squares, self._num, self._most, len(used)], np.float64)
        return head.tobytes() + used.astype(np.int64).tobytes() + self._counts[used].tobytes()

    @staticmethod
    def from_bytes(data: bytes) -> Gaps:
        """Raises ValueError."""
        gaps = Gaps()
        head = np.frombuffer(data, np.float64, 5)
        gaps._sum, gaps._squares, gaps._num, gaps._most = float(head[0]), float(head[1]), int(head[2]), float(head[3])
        used = np.frombuffer(data, np.int64, int(head[4]), offset=40)
        gaps._counts[used] = np.frombuffer(data, np.int64, int(head[4]), offset=40 + 8 * int(head[4]))
        return gaps

    def _flush(self) -> None:
        if not self._buffer:
            return
        values = np.frombuffer(self._buffer)
        self._buffer = array("d")
        bins = np.log(np.clip(values, _LEAST_S, _MOST_S) / _LEAST_S) / math.log(_STEP)
        counts = np.bincount(bins.astype(np.int64))
        self._counts[: len(counts)] += counts
        self._sum += float(values.sum())
        self._squares += float(np.square(values).sum())
        self._num += len(values)
        self._most = max(self._most, float(values.max()))


def _middle(bin_index: int) -> float:
    return float(_LEAST_S * _STEP ** (bin_index + 0.5)) if bin_index else 0.0

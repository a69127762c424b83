"""Gaps between tokens, counted in a histogram: 200 kB hold hundreds of millions of gaps, and histograms add up."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MIN_S, _MAX_S = 1e-6, 1e5
_STEP = 1.001
"""Each bin is 0.1 % wider than the one before, so a percentile is exact to 0.05 %."""
_BINS = math.ceil(math.log(_MAX_S / _MIN_S) / math.log(_STEP)) + 1
_BUFFERED = 4096


class Gaps:
    """A histogram of gaps. Mean and standard deviation are exact, percentiles to 0.05 %."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_BINS, np.int64)
        self._buffer = array("d")
        self._sum = 0.0
        self._squares = 0.0
        self._num = 0
        self._largest = 0.0

    def __len__(self) -> int:
        return self._num + len(self._buffer)

    def add(self, gaps_s: Sequence[float] | NDArray[np.float64]) -> None:
        """Adds gaps in seconds."""
        self._buffer.extend(gaps_s)
        if len(self._buffer) >= _BUFFERED:
            self._flush()

    def merge(self, other: Gaps) -> None:
        """Adds all gaps of another histogram."""
        other._flush()
        self._counts += other._counts
        self._sum += other._sum
        self._squares += other._squares
        self._num += other._num
        self._largest = max(self._largest, other._largest)

    def mean(self) -> float:
        """Mean in seconds; 0 without gaps."""
        self._flush()
        return self._sum / self._num if self._num else 0.0

    def std(self) -> float:
        """Standard deviation in seconds."""
        mean = self.mean()
        return math.sqrt(max(0.0, self._squares / self._num - mean * mean)) if self._num else 0.0

    def largest(self) -> float:
        self._flush()
        return self._largest

    def percentile(self, percent: float) -> float:
        """A percentile in seconds, by nearest rank; 0 without gaps."""
        self._flush()
        if not self._num:
            return 0.0
        rank = round(percent / 100 * (self._num - 1))
        bin_index = int(np.searchsorted(np.cumsum(self._counts), rank, side="right"))
        return min(_middle(bin_index), self._largest)

    def histogram(self, bins_per_decade: int = 20) -> dict[str, list[float]]:
        """A coarser histogram for plots: `edges_s` has one value more than `counts`."""
        self._flush()
        used = np.flatnonzero(self._counts)
        if not len(used):
            return {"edges_s": [], "counts": []}
        # The first bin's middle is 0, which a logarithmic axis can't show.
        middles = np.maximum([_middle(int(at)) for at in used], _MIN_S * _STEP)
        first = math.floor(math.log10(middles[0]) * bins_per_decade)
        last = math.floor(math.log10(middles[-1]) * bins_per_decade) + 1
        edges = [10 ** (at / bins_per_decade) for at in range(first, last + 1)]
        counts, _ = np.histogram(middles, bins=edges, weights=self._counts[used])
        return {"edges_s": edges, "counts": [float(count) for count in counts]}

    def to_bytes(self) -> bytes:
        """Encodes the histogram for `from_bytes` in another process."""
        self._flush()
        used = np.flatnonzero(self._counts)
        head = np.array([self._sum, self._squares, self._num, self._largest, len(used)], np.float64)
        return head.tobytes() + used.astype(np.int64).tobytes() + self._counts[used].tobytes()

    @staticmethod
    def from_bytes(data: bytes) -> Gaps:
        """Decodes what `to_bytes` returned; raises ValueError."""
        gaps = Gaps()
        head = np.frombuffer(data, np.float64, 5)
        gaps._sum, gaps._squares, gaps._num, gaps._largest = (
            float(head[0]),
            float(head[1]),
            int(head[2]),
            float(head[3]),
        )
        used = np.frombuffer(data, np.int64, int(head[4]), offset=40)
        gaps._counts[used] = np.frombuffer(data, np.int64, int(head[4]), offset=40 + 8 * int(head[4]))
        return gaps

    def _flush(self) -> None:
        if not self._buffer:
            return
        values = np.frombuffer(self._buffer)
        self._buffer = array("d")
        bins = np.log(np.clip(values, _MIN_S, _MAX_S) / _MIN_S) / math.log(_STEP)
        counts = np.bincount(bins.astype(np.int64))
        self._counts[: len(counts)] += counts
        self._sum += float(values.sum())
        self._squares += float(np.square(values).sum())
        self._num += len(values)
        self._largest = max(self._largest, float(values.max()))


def _middle(bin_index: int) -> float:
    return float(_MIN_S * _STEP ** (bin_index + 0.5)) if bin_index else 0.0

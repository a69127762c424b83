"""Arrival times of requests, as in `vllm bench serve`: the gaps between them are gamma distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


class Arrivals(Protocol):
    """Draws the arrival times of a workload."""

    @property
    def rate(self) -> float:
        """Average requests per second; infinity: all are due at once."""
        ...

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Seconds from the workload's start, in rising order."""
        ...


@dataclass(frozen=True, slots=True)
class UnpacedArrivals:
    """All requests are due at once; with a limited concurrency the load is a closed loop."""

    @property
    def rate(self) -> float:
        return float("inf")

    def times(self, count: int, rng: np.random.Generator) -> Times:
        return np.zeros(count)


@dataclass(frozen=True, slots=True)
class SteadyArrivals:
    """Equal gaps between requests."""

    rate: float

    def times(self, count: int, rng: np.random.Generator) -> Times:
        return np.arange(1, count + 1) / self.rate


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Gamma-distributed gaps of shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less is burstier.

    As in vLLM the last request arrives at count / rate exactly, so the seed does not change the load.
    """

    rate: float
    burstiness: float = 1.0

    def times(self, count: int, rng: np.random.Generator) -> Times:
        times = np.cumsum(rng.gamma(self.burstiness, 1.0 / (self.rate * self.burstiness), count))
        return times * (count / self.rate / times[-1]) if count and times[-1] > 0 else times


@dataclass(frozen=True, slots=True)
class RampArrivals:
    """The rate goes from `start` to `end`, request by request, linearly or exponentially."""

    start: float
    end: float
    is_exponential: bool = False
    burstiness: float = 1.0

    @property
    def rate(self) -> float:
        return (self.start + self.end) / 2

    def times(self, count: int, rng: np.random.Generator) -> Times:
        progress = np.arange(count) / max(count - 1, 1)
        if self.is_exponential:
            rates = self.start * (self.end / self.start) ** progress
        else:
            rates = self.start + (self.end - self.start) * progress
        even = self.burstiness == float("inf")
        return np.cumsum(1.0 / rates if even else rng.gamma(self.burstiness, 1.0 / (rates * self.burstiness)))

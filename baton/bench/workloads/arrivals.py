"""When requests arrive, as `vllm bench serve` has it: the gaps between them are gamma distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


class Arrivals(Protocol):
    """A way of arriving."""

    @property
    def rate(self) -> float:
        """Requests per second, on average; infinity: whenever a place is free."""
        ...

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Seconds from the begin, not falling."""
        ...


@dataclass(frozen=True, slots=True)
class UnpacedArrivals:
    """All at once: who limits how many are open has a closed loop."""

    @property
    def rate(self) -> float:
        return float("inf")

    def times(self, count: int, rng: np.random.Generator) -> Times:
        return np.zeros(count)


@dataclass(frozen=True, slots=True)
class SteadyArrivals:
    """One after the other at equal distances."""

    rate: float

    def times(self, count: int, rng: np.random.Generator) -> Times:
        return np.arange(1, count + 1) / self.rate


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Gaps of shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less comes in bursts, more evenly.

    As in vLLM the last one arrives at count / rate exactly: chance places requests, it does not change the load.
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

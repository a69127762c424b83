"""How busy encode nodes are, and how many are wanted. Pure.

An encode node makes rows of one input at a time. Neither what it is asked for nor what it makes in a second is reported
to routers, but how many inputs it has at a moment is. With inputs that come at random a node that is busy for the share
`p` of its time has `p / (1 - p)` of them, so one that has `n` inputs on average is busy for `n / (1 + n)` of its time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean

from baton.values import value

_WINDOW_S = 60.0
_MOST_SAMPLES = 120
_MOST_PRESSURE = 0.8


@value(frozen=True, slots=True)
class EncoderDemand:
    """The pool of encode nodes: how busy it is (1: all of the time), how many nodes it has, and how many are wanted."""

    pressure: float = 0.0
    num_nodes: int = 0
    wanted: int = 0

    @property
    def wanted_pressure(self) -> float:
        """The pressure with the nodes that are wanted."""
        return self.pressure * self.num_nodes / max(1, self.wanted)


class EncoderMeter:
    """Means over the last minute, from one sample a tick. Seconds on the caller's clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_MOST_SAMPLES)
        """When, and how many inputs all nodes had together."""

    def sample(self, inputs: Sequence[int], now: float) -> EncoderDemand:
        """Take the inputs that each encode node has now. Without nodes none are wanted: prefill nodes encode, then."""
        if not inputs:
            self._samples.clear()
            return EncoderDemand()
        self._samples.append((now, sum(inputs)))
        while self._samples[0][0] <= now - _WINDOW_S:
            self._samples.popleft()
        mean = fmean(count for _, count in self._samples) / len(inputs)
        pressure = mean / (1.0 + mean)
        return EncoderDemand(pressure, len(inputs), max(1, math.ceil(len(inputs) * pressure / _MOST_PRESSURE)))

"""How busy encode nodes are, and how many are wanted. Pure.

An encode node makes rows of one input at a time, and a router knows at each moment whether it has any: the share of
these moments at which it has is the share of its time that it is busy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean

from baton.values import value
from router.planner.size import SizeLaw, SizeSettings

_WINDOW_S = 60.0
_MOST_SAMPLES = 120
_BUSY_S = 30.0
MOST_PRESSURE = 0.8
"""There are to be as many nodes as keep the pressure below it."""


@value(frozen=True, slots=True)
class EncoderDemand:
    """The pool of encode nodes: how busy it is (1: all of the time), how many nodes it has, and how many are wanted."""

    pressure: float = 0.0
    num_nodes: int = 0
    wanted: int = 0

    def pressure_with(self, num_nodes: int) -> float:
        """The pressure with so many nodes."""
        return self.pressure * self.num_nodes / max(1, num_nodes)


def encoder_law(most_nodes: int) -> SizeLaw:
    """Decides on the number of encode nodes, of which there are at most so many. One at least stays.

    Inputs come in bursts, and rows that are late cost a prefill node's time and no request, so nodes are added later
    than others.
    """
    return SizeLaw(SizeSettings(min_nodes=1, max_nodes=most_nodes, most_pressure=MOST_PRESSURE, busy_s=_BUSY_S))


class EncoderMeter:
    """Means over the last minute, from one sample a tick. Seconds on the caller's clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_MOST_SAMPLES)
        """When, and how many of the nodes were busy."""

    def sample(self, inputs: Sequence[int], now: float) -> EncoderDemand:
        """Take the inputs that each encode node has now. Without nodes none are wanted: prefill nodes encode, then."""
        if not inputs:
            self._samples.clear()
            return EncoderDemand()
        self._samples.append((now, sum(map(bool, inputs))))
        while self._samples[0][0] <= now - _WINDOW_S:
            self._samples.popleft()
        pressure = min(1.0, fmean(count for _, count in self._samples) / len(inputs))
        return EncoderDemand(pressure, len(inputs), max(1, math.ceil(len(inputs) * pressure / MOST_PRESSURE)))

"""A day of two kinds of requests, in 25 minutes: long prompts with short answers peak early, chats late.

The lengths are those of two of Azure's traces, one after the other from a random place on. Arrivals are Poisson
processes whose rates follow bell curves, since the traces themselves are of one hour each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random

from baton.bench.workloads.trace import AZURE, Trace, TraceScale
from baton.bench.workloads.workload import WorkloadRequest, unique_piece
from baton.errors import InvalidRequest

DAY_S = 1500.0
_LONGEST_PROMPT = 12_000


@dataclass(frozen=True, slots=True)
class _Curve:
    """The rate of one kind of requests over the day, in requests per second; times are shares of the day."""

    least: float
    peak: float
    at: float
    width: float

    @property
    def most(self) -> float:
        return self.least + self.peak

    def rate(self, share: float) -> float:
        return self.least + self.peak * math.exp(-0.5 * ((share - self.at) / self.width) ** 2)


_CURVES = {
    "azure_2023_code.csv": _Curve(1.5, 11.0, 0.27, 0.11),
    "azure_2023_conv.csv": _Curve(1.0, 7.0, 0.72, 0.13),
}


class Day:
    """The requests of a day, whose lengths are read from the files in a folder when they are needed first."""

    def __init__(self, folder: Path, scale: TraceScale, seed: int = 0, *, skip_broken: bool = False) -> None:
        """`scale.time`: a day takes that many times less than DAY_S, with rates as high."""
        self._folder = folder
        self._scale = scale
        self._seed = seed
        self._skip_broken = skip_broken

    def __len__(self) -> int:
        """Reads the files; raises BrokenTraceLine, InvalidRequest and OSError."""
        return len(self._requests)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return iter(self._requests)

    @cached_property
    def _requests(self) -> list[WorkloadRequest]:
        rng, length_s = Random(self._seed), DAY_S / self._scale.time
        kinds = [self._kind(rng, name, curve, length_s) for name, curve in _CURVES.items()]
        return [
            WorkloadRequest(index, at, prompt, output, (unique_piece(prompt, self._seed, index),))
            for index, (at, prompt, output) in enumerate(heapq.merge(*kinds))
        ]

    def _kind(self, rng: Random, name: str, curve: _Curve, length_s: float) -> list[tuple[float, int, int]]:
        """The arrivals of one kind of requests, with the tokens of prompt and output."""
        scale = replace(self._scale, time=1.0, max_input=self._scale.max_input or _LONGEST_PROMPT)
        trace = Trace(self._folder / name, AZURE, scale, skip_broken=self._skip_broken)
        lengths = [(request.input_length, request.output_length) for request in trace]
        if not lengths:
            raise InvalidRequest("--dataset-path", f"{name} contains no request")
        number, now, arrivals = rng.randrange(len(lengths)), 0.0, []
        while (now := now + rng.expovariate(curve.most)) < length_s:
            # A thinned Poisson process: of one with the highest rate, each arrival is kept with the share of its time.
            if rng.random() < curve.rate(now / length_s) / curve.most:
                arrivals.append((now, *lengths[number % len(lengths)]))
                number += 1
        return arrivals

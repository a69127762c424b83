"""A workload: requests in the order of their arrival, the same ones in every iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from baton.bench.workloads.arrivals import Arrivals
from baton.bench.workloads.request import Piece, WorkloadRequest


class Workload(Protocol):
    """An iterable of requests."""

    def __len__(self) -> int:
        """The number of requests."""
        ...

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Makes the requests one at a time, always the same ones."""
        ...

    def describe(self) -> dict[str, Any]:
        """The workload's parameters for the result file, as JSON values."""
        ...


class Shape(NamedTuple):
    """A request without its arrival."""

    pieces: Sequence[Piece]
    output_length: int


class Lengths(Protocol):
    """Prompts and output lengths of requests, without their arrivals."""

    def shapes(self, count: int, seed: int) -> Iterator[Shape]:
        """Yields `count` requests."""
        ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A workload that combines lengths with arrivals."""

    lengths: Lengths
    arrivals: Arrivals
    count: int
    seed: int = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[WorkloadRequest]:
        times = self.arrivals.times(self.count, np.random.default_rng((self.seed, 1)))
        for index, shape in enumerate(self.lengths.shapes(self.count, self.seed)):
            tokens = sum(piece.length for piece in shape.pieces)
            yield WorkloadRequest(index, float(times[index]), tokens, shape.output_length, shape.pieces)

    def describe(self) -> dict[str, Any]:
        rate = self.arrivals.rate
        return {
            **self.lengths.describe(),
            "num_prompts": self.count,
            "request_rate": rate if rate != float("inf") else "inf",
            "burstiness": getattr(self.arrivals, "burstiness", None),
            "seed": self.seed,
        }

"""A workload: requests in the order of their arrival, the same ones in every iteration; what prompts are made of, and
when they are sent.

A prompt is a sequence of pieces. A piece has a name and a length: the same name always stands for the same tokens, and
a shorter piece for the first tokens of a longer one of that name. So tokens are made only when they are needed, the
simulator, which needs only block keys, makes none, and prompts share what the trace says they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.values import value

_MASK = (1 << 64) - 1
_UNIQUE = 1 << 63
"""Bit in the names of pieces that are from no trace: a trace's hash ids are below it."""


class Piece(NamedTuple):
    """A named part of a prompt."""

    hash_id: int
    """The name, 0 to 2^64 - 1."""
    length: int
    """Number of tokens, at least one."""


@value(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload."""

    index: int
    """Position in the workload, from 0."""
    arrival_s: float
    """Seconds after the workload's start. A later turn of a session arrives when the one before it has ended and
    `think_s` have passed, but not before this.
    """
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens to generate."""
    pieces: Sequence[Piece]
    """The prompt, in order; their lengths add up to `input_length`."""
    session: int | None = None
    """Requests of one session are sent one after the other, in the order of their turns."""
    turn: int = 0
    think_s: float = 0.0
    tenant: str = ""

    def token_ids(self, vocab_size: int) -> list[int]:
        """The prompt, each id in [0, vocab_size)."""
        parts = [piece_tokens(piece, vocab_size) for piece in self.pieces]
        whole: list[int] = (parts[0] if len(parts) == 1 else np.concatenate(parts)).tolist()
        return whole


def unique_piece(length: int, *names: int) -> Piece:
    """A piece whose name is a hash of numbers (the seed, the request's index ...): other numbers, other tokens."""
    state = 0
    for name in names:
        state = _mixed((state ^ name) & _MASK)
    return Piece(state | _UNIQUE, length)


def piece_tokens(piece: Piece, vocab_size: int) -> NDArray[np.int64]:
    """The piece's token ids: SplitMix64 over their positions, seeded by the name (Steele et al., OOPSLA 2014)."""
    seed = np.uint64(_mixed(piece.hash_id & _MASK))
    z = seed + np.arange(1, piece.length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z % np.uint64(vocab_size)).astype(np.int64)


def _mixed(value: int) -> int:
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


# Arrival times of requests, as in `vllm bench serve`: the gaps between them are gamma distributed.

Times = NDArray[np.float64]


class Arrivals(Protocol):
    """Draws the arrival times of a workload."""

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Seconds from the workload's start, in rising order."""
        ...


@dataclass(frozen=True, slots=True)
class UnpacedArrivals:
    """All requests are due at once; with a limited concurrency the load is a closed loop."""

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

    def times(self, count: int, rng: np.random.Generator) -> Times:
        progress = np.arange(count) / max(count - 1, 1)
        if self.is_exponential:
            rates = self.start * (self.end / self.start) ** progress
        else:
            rates = self.start + (self.end - self.start) * progress
        even = self.burstiness == float("inf")
        return np.cumsum(1.0 / rates if even else rng.gamma(self.burstiness, 1.0 / (rates * self.burstiness)))


class Workload(Protocol):
    """An iterable of requests."""

    def __len__(self) -> int:
        """The number of requests."""
        ...

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Makes the requests one at a time, always the same ones."""
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

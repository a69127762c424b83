"""Synthetic workloads: random lengths, shared prefixes, and conversations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from baton.bench.workloads.workload import Arrivals, Piece, Shape, WorkloadRequest, unique_piece


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """`vllm bench serve --dataset-name random`: uniform in [length x (1 - ratio), length x (1 + ratio)]."""

    input_length: int
    output_length: int
    range_ratio: float = 0.0
    """From 0 (always these lengths) to below 1."""

    def shapes(self, count: int, seed: int) -> Iterator[Shape]:
        rng = np.random.default_rng((seed, 2))
        inputs = rng.integers(*self._bounds(self.input_length), size=count, endpoint=True)
        outputs = rng.integers(*self._bounds(self.output_length), size=count, endpoint=True)
        for index in range(count):
            yield Shape((unique_piece(int(inputs[index]), seed, index),), int(outputs[index]))

    def _bounds(self, length: int) -> tuple[int, int]:
        return max(1, int(length * (1 - self.range_ratio))), max(1, int(length * (1 + self.range_ratio)))


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """Lognormal lengths, clipped to [1, max]."""

    input_median: float
    input_sigma: float
    output_median: float
    output_sigma: float
    max_input: int
    max_output: int

    def shapes(self, count: int, seed: int) -> Iterator[Shape]:
        rng = np.random.default_rng((seed, 2))
        inputs = rng.lognormal(np.log(self.input_median), self.input_sigma, count).clip(1, self.max_input)
        outputs = rng.lognormal(np.log(self.output_median), self.output_sigma, count).clip(1, self.max_output)
        for index in range(count):
            yield Shape((unique_piece(int(inputs[index]), seed, index),), int(outputs[index]))


def sharegpt_like() -> LognormalLengths:
    """Lengths like ShareGPT's.

    The means are DistServe's for ShareGPT on OPT-13B (Zhong et al., OSDI 2024, figure 7: 755.5 and 200.3 tokens),
    within its 2,048 tokens of context. The lognormal shape and its sigma are our reading of DistServe's histograms.
    """
    # These medians have those means after clipping.
    return LognormalLengths(623.2, 1.0, 148.5, 1.0, 1536, 512)


# Prompts that start with one of a few prefixes, as with system prompts, documents or examples.

_PREFIX = 1
_SUFFIX = 2


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Each prompt is a prefix, drawn at random, and a unique suffix (vLLM's `prefix_repetition`)."""

    num_prefixes: int
    prefix_length: int
    suffix_length: int
    output_length: int

    def shapes(self, count: int, seed: int) -> Iterator[Shape]:
        chosen = np.random.default_rng((seed, 2)).integers(0, self.num_prefixes, count)
        for index in range(count):
            prefix = unique_piece(self.prefix_length, seed, _PREFIX, int(chosen[index]))
            yield Shape((prefix, unique_piece(self.suffix_length, seed, _SUFFIX, index)), self.output_length)


# Conversations: each prompt is the whole conversation so far and a new question.
#
# The assistant's answers in prompts are synthetic tokens too, so a conversation is the same in every run, whatever the
# model answers. Therefore a node's prefix cache never finds its own answers again, and what is measured is not better
# than in production.

_QUESTION, _ANSWER = 1, 2


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Sessions of several turns, with a pause between an answer and the next question."""

    arrivals: Arrivals
    """Arrivals of the first turns."""
    sessions: int
    turns: int
    first_length: int
    """Tokens of the first question, with the system prompt."""
    turn_length: int
    """Tokens of each later question."""
    output_length: int
    think_s: float = 0.0
    """Mean pause before a later question; pauses are exponentially distributed."""
    seed: int = 0

    def __len__(self) -> int:
        return self.sessions * self.turns

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Yields the sessions in the order of their arrival, each with all of its turns."""
        times = self.arrivals.times(self.sessions, np.random.default_rng((self.seed, 1)))
        rng = np.random.default_rng((self.seed, 2))
        for session in range(self.sessions):
            pauses = rng.exponential(self.think_s, self.turns) if self.think_s else np.zeros(self.turns)
            pieces: list[Piece] = []
            for turn in range(self.turns):
                length = self.turn_length if turn else self.first_length
                pieces.append(unique_piece(length, self.seed, _QUESTION, session, turn))
                yield WorkloadRequest(
                    session * self.turns + turn,
                    float(times[session]),
                    sum(piece.length for piece in pieces),
                    self.output_length,
                    tuple(pieces),
                    session,
                    turn,
                    float(pauses[turn]) if turn else 0.0,
                )
                pieces.append(unique_piece(self.output_length, self.seed, _ANSWER, session, turn))

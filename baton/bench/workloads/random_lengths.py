"""Prompts and outputs of random lengths; no prompts share a prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.bench.workloads.request import unique_piece
from baton.bench.workloads.workload import Shape


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

    def describe(self) -> dict[str, Any]:
        return {
            "dataset": "random",
            "random_input_len": self.input_length,
            "random_output_len": self.output_length,
            "random_range_ratio": self.range_ratio,
        }


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """Lognormal lengths, clipped to [1, max]."""

    input_median: float
    input_sigma: float
    output_median: float
    output_sigma: float
    max_input: int
    max_output: int
    name: str = "lognormal"

    def shapes(self, count: int, seed: int) -> Iterator[Shape]:
        rng = np.random.default_rng((seed, 2))
        inputs = rng.lognormal(np.log(self.input_median), self.input_sigma, count).clip(1, self.max_input)
        outputs = rng.lognormal(np.log(self.output_median), self.output_sigma, count).clip(1, self.max_output)
        for index in range(count):
            yield Shape((unique_piece(int(inputs[index]), seed, index),), int(outputs[index]))

    def describe(self) -> dict[str, Any]:
        return {
            "dataset": self.name,
            "input_median": self.input_median,
            "input_sigma": self.input_sigma,
            "output_median": self.output_median,
            "output_sigma": self.output_sigma,
            "max_input": self.max_input,
            "max_output": self.max_output,
        }


def sharegpt_like() -> LognormalLengths:
    """Lengths like ShareGPT's.

    The means are DistServe's for ShareGPT on OPT-13B (Zhong et al., OSDI 2024, figure 7: 755.5 and 200.3 tokens),
    within its 2,048 tokens of context. The lognormal shape and its sigma are our reading of DistServe's histograms.
    """
    # These medians have those means after clipping.
    return LognormalLengths(623.2, 1.0, 148.5, 1.0, 1536, 512, "sharegpt-like")

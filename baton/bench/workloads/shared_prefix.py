"""Prompts that start with one of a few prefixes, as with system prompts, documents or examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.bench.workloads.request import unique_piece
from baton.bench.workloads.workload import Shape

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

    def describe(self) -> dict[str, Any]:
        return {
            "dataset": "prefix_repetition",
            "prefix_repetition_num_prefixes": self.num_prefixes,
            "prefix_repetition_prefix_len": self.prefix_length,
            "prefix_repetition_suffix_len": self.suffix_length,
            "prefix_repetition_output_len": self.output_length,
        }

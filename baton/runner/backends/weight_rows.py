"""The weights that operations pack: plain, quantised or still in their file, and some of their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from baton.runner.backends.float8_weight import Float8Weight
from baton.runner.backends.quantized_weight import NarrowWeight, QuantizedWeight
from baton.runner.backends.weight_on_file import WeightOnFile

ReadWeight: TypeAlias = torch.Tensor | NarrowWeight
"""A weight in memory."""
Weight: TypeAlias = ReadWeight | WeightOnFile
"""What operations pack."""


def read_weight(weight: Weight) -> ReadWeight:
    """Read a weight that is still in its file."""
    return weight.read() if isinstance(weight, WeightOnFile) else weight


def rows_in(weights: Sequence[Weight], ranges: Sequence[range]) -> list[Weight]:
    """The rows in these ranges of stacked weights [N_i, K]."""
    taken: list[Weight] = []
    start = 0
    for weight in weights:
        stop = start + weight.shape[0]
        own = [range(max(rows.start, start) - start, min(rows.stop, stop) - start) for rows in ranges]
        taken += [rows_of(weight, rows.start, rows.stop) for rows in own if rows]
        start = stop
    return taken


def rows_of(weight: Weight, first: int, stop: int) -> Weight:
    """The rows `first` to before `stop` of a weight [N, K], which share its memory."""
    if isinstance(weight, torch.Tensor):
        return weight[first:stop]
    if isinstance(weight, WeightOnFile):
        return weight.rows(first, stop)
    if isinstance(weight, Float8Weight):
        return Float8Weight(weight.codes[first:stop], weight.scales[first:stop], weight.group)

    def part(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[first:stop]

    return QuantizedWeight(
        codes=weight.codes[first:stop],
        bits=weight.bits,
        group=weight.group,
        scales=weight.scales[first:stop],
        scale_factors=part(weight.scale_factors),
        zeros=weight.zeros if isinstance(weight.zeros, int) else weight.zeros[first:stop],
        offsets=part(weight.offsets),
        offset_factors=part(weight.offset_factors),
    )

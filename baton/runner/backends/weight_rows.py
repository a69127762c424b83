"""The weights that operations pack: plain, quantised or still in their file, and some of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from baton.runner.backends.quantized_weight import Float8Weight, NarrowWeight, QuantizedWeight


@dataclass(frozen=True, slots=True)
class WeightOnFile:
    """Some rows of a plain weight W [N, K], which are read whenever they are asked for.

    So a rank that packs its own rows of a weight never has the others in the dtype that it computes in.
    """

    source: Callable[[int, int], torch.Tensor]
    """Reads the rows `first` to before `stop` of W, in the dtype that the model computes in."""
    first: int
    stop: int
    k: int
    reads_all: bool = False
    """Whether the source makes all rows of W to give some of them."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and K."""
        return self.stop - self.first, self.k

    def rows(self, first: int, stop: int) -> WeightOnFile:
        """The rows `first` to before `stop` of these rows, unread."""
        return WeightOnFile(self.source, self.first + first, self.first + stop, self.k, self.reads_all)

    def read(self) -> torch.Tensor:
        """The rows [n, K]. They may be in the file's mapped memory."""
        return self.source(self.first, self.stop)


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

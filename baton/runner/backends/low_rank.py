"""What adapters add to products, whatever operations compute it: low-rank terms, and which rows have which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Outputs:
    """The B of a low-rank term for some neighbouring outputs of a product."""

    first: int
    """The first output. Those of a gated product are the gate's N and, behind them, the N of up."""
    b: torch.Tensor
    """[outputs, rank] in float32."""
    bias: torch.Tensor | None = None
    """[outputs] in float32, which the term's factor multiplies, too."""

    @property
    def stop(self) -> int:
        return self.first + self.b.shape[0]

    def continues_in(self, other: Outputs) -> bool:
        """Whether other outputs are right behind these, and alike."""
        return self.stop == other.first and (self.bias is None) == (other.bias is None)

    def part(self, first: int, stop: int, column: int) -> Outputs | None:
        """The outputs from `first` to before `stop`, of which the first one is moved to `column`; None without any."""
        start, end = max(first, self.first), min(stop, self.stop)
        if start >= end:
            return None
        own = slice(start - self.first, end - self.first)
        return Outputs(start - first + column, self.b[own], None if self.bias is None else self.bias[own])


@dataclass(frozen=True, slots=True)
class LowRank:
    """A term of one adapter in one product: to its outputs is added factor * (B (A x) + bias)."""

    a: torch.Tensor
    """[rank, K] in float32."""
    factor: float
    outputs: tuple[Outputs, ...]

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def to(self, device: torch.device) -> LowRank:
        """The same term on a device."""
        outputs = (
            Outputs(output.first, output.b.to(device), None if output.bias is None else output.bias.to(device))
            for output in self.outputs
        )
        return LowRank(self.a.to(device), self.factor, tuple(outputs))

    def parts(self, ranges: Sequence[tuple[int, int]]) -> LowRank | None:
        """The term for the outputs in ranges (first, stop), put one behind the other; None without any of its own."""
        neighbours: list[list[Outputs]] = []
        column = 0
        for first, stop in ranges:
            for output in self.outputs:
                part = output.part(first, stop, column)
                if part is None:
                    continue
                if neighbours and neighbours[-1][-1].continues_in(part):
                    neighbours[-1].append(part)
                else:
                    neighbours.append([part])
            column += stop - first
        return LowRank(self.a, self.factor, tuple(map(_joined, neighbours))) if neighbours else None


def _joined(neighbours: Sequence[Outputs]) -> Outputs:
    """Outputs that continue in each other as one."""
    if len(neighbours) == 1:
        return neighbours[0]
    biases = [part.bias for part in neighbours if part.bias is not None]
    return Outputs(
        neighbours[0].first, torch.cat([part.b for part in neighbours]), torch.cat(biases) if biases else None
    )


def parts_of(terms: Sequence[LowRank], ranges: Sequence[tuple[int, int]]) -> list[LowRank]:
    """The parts of terms for the outputs in some ranges, as `LowRank.parts` says."""
    return [part for term in terms if (part := term.parts(ranges)) is not None]


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """Which adapter each row of a product has, and what each of them adds to it."""

    slots: torch.Tensor
    """Int32 [rows] on the CPU: places in `weights`, or -1."""
    weights: Sequence[Any]
    """What `Operations.adapt` made of each adapter's terms for this product; None for one that doesn't change it."""

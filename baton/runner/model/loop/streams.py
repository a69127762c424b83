"""Rows in several streams: what a model does with them before its layers and behind them, and how layers use them.

Streams are side by side in wide rows (fused/streams.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import nn

from baton.runner.model.layers import PackedLinear
from baton.runner.model.loop.seen import equal
from baton.runner.model.loop.steps import Call, Columns, Step, SumInColumns

_LEAST = 1e-5
"""What the mean square of a stream is at least, by whose root it is divided."""


class SpreadStreams(nn.Module):
    """The rows of the embedding, and beside them products with them, as large as they are."""

    def __init__(self, products: Sequence[PackedLinear]) -> None:
        super().__init__()
        self._products = products  # no modules of this part: the model has them
        self.num_inputs = products[0].in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, T, N] to [1, T, S * N]"""
        size = _size(x)
        return torch.cat([x, *(_resized(by(x), size) for by in self._products)], dim=-1)


class MergedStreams(nn.Module):
    """The mean of the first stream and of products with the others, as large as the first one."""

    def __init__(self, products: Sequence[PackedLinear]) -> None:
        super().__init__()
        self._products = products
        self.num_inputs = (1 + len(products)) * products[0].in_features

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [1, T, S * N] to [1, T, N]"""
        first, *others = rows.chunk(1 + len(self._products), dim=-1)
        size = _size(first)
        pairs = zip(self._products, others, strict=True)
        return torch.stack([first, *(_resized(by(other), size) for by, other in pairs)]).mean(dim=0)


def _size(x: torch.Tensor) -> torch.Tensor:
    mean: torch.Tensor = torch.mean(x**2, dim=-1, keepdim=True) ** 0.5
    return mean


def _resized(x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    return x * size / torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True).clamp(min=_LEAST))


PartAround = SpreadStreams | MergedStreams


def parts_around(base: nn.Module) -> tuple[PartAround, ...]:
    """What a model without its head may compute before its layers and behind them, by its lists of products."""
    spread, merged = (getattr(base, name, None) for name in ("altup_projections", "altup_unembed_projections"))
    if not isinstance(spread, nn.ModuleList) or not isinstance(merged, nn.ModuleList):
        return ()
    return SpreadStreams([*spread]), MergedStreams([*merged])


def step_in_streams(
    rows: torch.Tensor, known: Mapping[int, torch.Tensor], around: Sequence[PartAround], *, gives: int
) -> Step | None:
    """The step that gives `rows` [T, N], whose number is `gives`, of known ones: takes some of their columns, adds to
    some, or is a part around the layers. None: there is no such step."""
    alike = {number: one for number, one in known.items() if one.dtype == rows.dtype}
    for (number, one), columns in ((item, at) for item in alike.items() for at in _pieces(item[1], rows.shape[1])):
        if equal(one[:, columns.start : columns.stop], rows):
            return Columns(number, columns, gives)
    for (number, one), (other, added) in product(alike.items(), alike.items()):
        # Layers add to all streams but the first, or some.
        for columns in (range(at.start, rows.shape[1]) for at in _pieces(rows, added.shape[1])):
            if one.shape == rows.shape and equal(added_in(one, added, columns), rows):
                return SumInColumns(number, other, columns, gives)
    for part, (number, one) in product(around, alike.items()):
        if one.shape[1] == part.num_inputs and equal(part(one[None])[0], rows):
            return Call(part, number, gives)
    return None


def added_in(rows: torch.Tensor, added: torch.Tensor, columns: range) -> torch.Tensor:
    """Rows [T, S * N], with `added` [T, N] in each stream of some columns."""
    total = rows.clone()
    total[:, columns.start : columns.stop] += added.repeat(1, len(columns) // added.shape[1])
    return total


def _pieces(rows: torch.Tensor, width: int) -> Iterator[range]:
    """The columns of rows in pieces of a width, if these are fewer."""
    if 0 < width < rows.shape[1] and rows.shape[1] % width == 0:
        yield from (range(first, first + width) for first in range(0, rows.shape[1], width))

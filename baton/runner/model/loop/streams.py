"""Rows in several streams: what a model does with them before its layers and behind them, and how layers use them.

Streams are side by side in wide rows (fused/streams.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_states import nearest_root
from baton.runner.model.layers import PackedLinear
from baton.runner.model.loop.seen import equal
from baton.runner.model.loop.steps import Call, Columns, Step, SumInColumns
from baton.runner.model.loop.stream_ends import MergedStreams, SpreadStreams

PartAround = SpreadStreams | MergedStreams


def parts_around(base: nn.Module) -> tuple[SpreadStreams, MergedStreams] | tuple[()]:
    """What a model without its head may compute before its layers and behind them, by its lists of products."""
    spread, merged = (getattr(base, name, None) for name in ("altup_projections", "altup_unembed_projections"))
    if not isinstance(spread, nn.ModuleList) or not isinstance(merged, nn.ModuleList):
        return ()
    if not all(isinstance(part, PackedLinear) for part in (*spread, *merged)):
        return ()
    return SpreadStreams([*spread]), MergedStreams([*merged])


def width_between_layers(module: Any) -> int:
    """How wide the rows between a model's layers are, all streams together; 0: its configuration doesn't say."""
    around = next(filter(None, map(parts_around, module.modules())), None)
    return around[1].num_inputs if around else getattr(module.config, "hidden_size", 0)


_POWERS = frozenset({torch.pow, torch.Tensor.pow, torch.Tensor.__pow__})


class RowSizes(TorchFunctionMode):
    """While active, means of rows are those of Baton's operations, and square roots are the nearest numbers.

    torch adds in another order, and its roots are one unit in the last place away in a sixth of all cases.
    """

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.mean and len(args) == 1 and kwargs == {"dim": -1, "keepdim": True}:
            means = self._operations.row_means(args[0].reshape(-1, args[0].shape[-1]).contiguous())
            return means.view(*args[0].shape[:-1], 1)
        is_root = func in _POWERS and len(args) == 2 and isinstance(args[1], float) and args[1] == 0.5
        if is_root or (func is torch.sqrt and not kwargs):
            return nearest_root(args[0])
        return func(*args, **(kwargs or {}))


def sizes_of(module: nn.Module, operations: Operations) -> RowSizes | None:
    """What is to be active while a model is called that measures its streams; None: it has none."""
    return RowSizes(operations) if any(parts_around(part) for part in module.modules()) else None


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

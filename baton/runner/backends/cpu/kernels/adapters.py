"""The adapters of a product's rows as the kernels take them (csrc/adapters.inc.h)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.runner.backends.cpu.kernels.call_structs import AdapterPanel, AdapterRows, AdapterWeights
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.huge_pages import zeros_for_reading
from baton.runner.backends.low_rank import LowRank, RowAdapters

_LANES = 16
_GROUP_PANELS = 4
_RANKS = 8
"""The kernels compute so many ranks together."""
_STEP = 32
"""And so many columns of x at a time."""
_PAIR = 2 * _LANES
"""The numbers of a pair of ranks in a panel, in which offsets are counted."""
_MOST_RANKS = 2**16 - 1
"""A panel's ranks are counted in 16 bits."""


@dataclass(frozen=True, slots=True)
class KernelAdapter:
    """What one adapter adds to one packed weight."""

    rank: int
    """The ranks of all its terms, padded."""
    weights: AdapterWeights
    kept: tuple[object, ...]
    """The memory that `weights` points to."""

    @property
    def address(self) -> int:
        return ctypes.addressof(self.weights)


def adapt_part(terms: Sequence[LowRank], n: int, k: int, *, gated: bool, dtype: torch.dtype) -> KernelAdapter | None:
    """Prepare low-rank terms for a packed weight with `n` outputs of `k` inputs; None without terms.

    A and B are rounded to `dtype`, that of x. Raises KernelArgumentError for terms of too many ranks.
    """
    if not terms:
        return None
    # Each term has an even number of ranks, since the kernels add B in pairs: no pair has a rank of the next term.
    ranks = [_even(term.rank + any(output.bias is not None for output in term.outputs)) for term in terms]
    rank = -(-sum(ranks) // _RANKS) * _RANKS
    if rank > _MOST_RANKS:
        raise KernelArgumentError(
            "terms", f"have {rank} ranks together, more than {_MOST_RANKS}: take smaller adapters"
        )
    columns = -(-n // _LANES) * _LANES * (2 if gated else 1)
    num_panels = -(-columns // (_LANES * _GROUP_PANELS)) * _GROUP_PANELS
    steps = -(-k // _STEP)
    # The dtype is named wherever C reads or writes: another thread that loads a model changes the default.
    rows, dense = (torch.zeros(rank, width, dtype=torch.float32) for width in (steps * _STEP, num_panels * _LANES))
    factors, constants = (torch.zeros(rank, dtype=torch.float32) for _ in range(2))
    firsts, stops = [sum(ranks)] * num_panels, [0] * num_panels
    first = 0
    for term, own in zip(terms, ranks, strict=True):
        stop = first + term.rank
        rows[first:stop, :k] = term.a
        factors[first:stop] = term.factor
        if any(output.bias is not None for output in term.outputs):
            constants[stop] = term.factor
        for outputs in term.outputs:
            places = _packed_columns(torch.arange(outputs.first, outputs.stop), n, gated)
            dense[first:stop, places] = outputs.b.T
            if outputs.bias is not None:
                dense[stop, places] = outputs.bias
            for panel in torch.unique(places // _LANES).tolist():
                firsts[panel], stops[panel] = min(firsts[panel], first), max(stops[panel], first + own)
        first += own
    a = zeros_for_reading(rows.numel(), dtype)
    a.view(-1, steps, _RANKS, _STEP).copy_(rows.view(-1, _RANKS, steps, _STEP).transpose(1, 2))
    b, panels = _panels_of(dense.view(-1, num_panels, _LANES), firsts, stops, dtype)
    weights = AdapterWeights(
        a.data_ptr(),
        b.data_ptr(),
        factors.data_ptr(),
        constants.data_ptr(),
        ctypes.addressof(panels),
        rank,
        k,
    )
    return KernelAdapter(rank, weights, (a, b, factors, constants, panels))


def _even(number: int) -> int:
    return number + number % 2


def _packed_columns(outputs: torch.Tensor, n: int, gated: bool) -> torch.Tensor:
    """The packed columns of outputs: of a gated weight the panels of gate and up take turns (csrc/kernels.h)."""
    if not gated:
        return outputs
    of_up = (outputs >= n).long()
    within = outputs - n * of_up
    return (2 * (within // _LANES) + of_up) * _LANES + within % _LANES


def _panels_of(
    dense: torch.Tensor, firsts: list[int], stops: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, ctypes.Array[AdapterPanel]]:
    """B panel by panel, of each only the ranks that change it, and where each panel's part is."""
    panels = (AdapterPanel * len(firsts))()
    size = 0
    alike: dict[tuple[int, int], list[int]] = {}
    for index, (first, stop) in enumerate(zip(firsts, stops, strict=True)):
        count = max(0, stop - first)
        panels[index] = AdapterPanel(size, first if count else 0, count)
        size += count // 2
        if count:
            alike.setdefault((first, count), []).append(index)
    b = zeros_for_reading(size * _PAIR, dtype)
    for (first, count), places in alike.items():
        offsets = torch.tensor([panels[index].offset * _PAIR for index in places])
        numbers = dense[first : first + count, places].transpose(0, 1)
        if dtype == torch.bfloat16:
            # Pairs of ranks, the first one in the odd place.
            numbers = numbers.reshape(len(places), count // 2, 2, _LANES).flip(2).transpose(2, 3)
        numbers = numbers.reshape(len(places), -1)
        b[offsets[:, None] + torch.arange(numbers.shape[1])] = numbers.to(dtype)
    return b, panels


class AdapterTable(list[Sequence[Sequence[KernelAdapter | None] | None]]):
    """By product of the model, then by slot, then by part of the product's weight. It is never changed.

    Programs refer to it weakly, so that they keep no adapter in memory that was unloaded.
    """


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step's rows."""

    slots: torch.Tensor
    """Int32 [T]: places in the table, or -1."""
    table: AdapterTable


class ProductAdapters:
    """The structure of a call for one product's rows, with what it points to."""

    __slots__ = ("_kept", "call")

    def __init__(self, adapters: RowAdapters, part: int, num_rows: int) -> None:
        """`part`: the number of the packed weight among those that a product consists of."""
        slots = adapters.slots
        if slots.shape != (num_rows,) or slots.dtype != torch.int32 or not slots.is_contiguous():
            raise KernelArgumentError("adapters", f"must have int32 slots [{num_rows}], contiguous")
        own = [None if weights is None else weights[part] for weights in adapters.weights]
        pointers = (ctypes.c_void_p * len(own))(*(None if weight is None else weight.address for weight in own))
        stride = max((weight.rank for weight in own if weight is not None), default=0)
        t = torch.empty(num_rows * stride, dtype=torch.float32)
        self.call = AdapterRows(slots.data_ptr(), ctypes.addressof(pointers), t.data_ptr(), len(own), stride)
        self._kept = (slots, own, pointers, t)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.call)


class ProgramAdapters:
    """What a program's products have of a table of adapters: pointers [products][slots], and the widest t.

    The pointers are good while the table is there, which whoever computes with it keeps.
    """

    def __init__(self, table: AdapterTable, products: Sequence[tuple[int, int]]) -> None:
        """`products`: of each of the program's products, its number in the model and the part of its weight."""
        self._table = weakref.ref(table)
        self.num_slots = len(table[0]) if table else 0
        self.pointers = (ctypes.c_void_p * (len(products) * self.num_slots))()
        self.stride = 0
        for index, (product, part) in enumerate(products):
            for slot, of_slot in enumerate(table[product]):
                weight = None if of_slot is None else of_slot[part]
                if weight is not None:
                    self.pointers[index * self.num_slots + slot] = weight.address
                    self.stride = max(self.stride, weight.rank)

    def is_of(self, table: AdapterTable) -> bool:
        """Whether the pointers are those of this table."""
        return self._table() is table

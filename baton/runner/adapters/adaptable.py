"""Products that adapters may change, and the adapters of the rows that are being computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from baton.runner.backends.cpu.kernels.adapters import AdapterTable, StepAdapters
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.program import Program
from baton.runner.backends.low_rank import RowAdapters
from baton.runner.backends.operations import Activation, Operations


@dataclass(frozen=True, slots=True)
class LoadedAdapters:
    """The adapters that are loaded at one time. It is never changed: who computes with it keeps it."""

    products: AdapterTable = field(default_factory=AdapterTable)
    """By number of the product, then by slot: what `Operations.adapt` returned, or None."""
    experts: Sequence[Sequence[Sequence[Any] | None]] = ()
    """By number of the experts' product, by slot, and by expert: what `Operations.adapt` returned, or None."""
    embeddings: Sequence[Any] = ()
    """By slot: what the adapter adds to embeddings, or None."""


class RowsOfStep:
    """The adapters of the rows that are being computed: at first all rows of a step, later those that are left of them.

    Written and read by the thread that computes steps.
    """

    def __init__(self) -> None:
        self.table = LoadedAdapters()
        self.slots: torch.Tensor | None = None
        """Int32 [rows] on the CPU: the slot of each row's adapter, or -1; None: no row has one."""
        self.row_quantum = 1
        """A product may be given fewer padding rows than this."""
        self.num_probed = 0
        """The number of rows of the step that finds out which products compute all rows; 0 in any other step."""

    def keep(self, index: torch.Tensor) -> None:
        """Go on with the rows `index` alone."""
        if self.slots is not None:
            self.slots = self.slots[index.to(self.slots.device)]

    def keep_first(self, count: int) -> None:
        """Go on with the first rows alone."""
        if self.slots is not None:
            self.slots = self.slots[:count]

    def of_product(self, num_rows: int) -> torch.Tensor | None:
        """The slots [rows] for a product of all rows that are left, and of padding behind them; None if none has one.

        Raises RuntimeError for a product of other rows.
        """
        if (slots := self.slots) is None:
            return None
        num_padding = num_rows - slots.shape[0]
        if not 0 <= num_padding < self.row_quantum:
            raise RuntimeError(f"a product of {num_rows} rows is not of the step's {slots.shape[0]} rows")
        return torch.cat((slots, slots.new_full((num_padding,), -1))) if num_padding else slots

    def of_step(self) -> StepAdapters | None:
        """The adapters for a program that computes all rows of the step; None if no row has one."""
        return None if self.slots is None else StepAdapters(self.slots, self.table.products)


class ModuleOutputs(NamedTuple):
    """Which outputs of a product are those of one module of the model."""

    module: str
    """The module's name: in a part that has products, from this part on; empty for the part itself."""
    first: int
    num_outputs: int


class AdaptableProduct:
    """A product of the model. Rows whose adapter changes it get what the adapter adds."""

    def __init__(
        self,
        operations: Operations,
        packed: Any,
        num_inputs: int,
        modules: Sequence[tuple[str, int]],
    ) -> None:
        """`packed`: the weight of all modules, which are given by name and number of outputs, stacked; of a gated
        product the gate and up.
        """
        self.packed = packed
        self.num_inputs = num_inputs
        self.modules: list[ModuleOutputs] = []
        first = 0
        for name, num_outputs in modules:
            self.modules.append(ModuleOutputs(name, first, num_outputs))
            first += num_outputs
        self._operations = operations
        self._number: int | None = None
        self._rows = _NO_ROWS
        self._num_rows: set[int] = set()
        self._row_dtypes: set[torch.dtype] = set()

    def attach(self, number: int, rows: RowsOfStep) -> None:
        """Give the product its number in tables of adapters, and the rows of the steps to come."""
        self._number, self._rows = number, rows

    @property
    def computes_all_rows(self) -> bool:
        """Whether it computed all rows of the step that was to find out, once each."""
        return self._num_rows == {0}

    @property
    def row_dtype(self) -> torch.dtype | None:
        """The dtype of the rows of the step that was to find out; None if it computed no rows, or some of each."""
        return next(iter(self._row_dtypes)) if len(self._row_dtypes) == 1 else None

    def keep(self, index: torch.Tensor) -> None:
        """Go on with the rows `index` alone, in this product and all that are computed behind it in the step."""
        self._rows.keep(index)

    def linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        packed: Any = None,
    ) -> torch.Tensor:
        """The product, as `Operations.linear` computes it, with the adapters of the step's rows.

        `packed`: the same weight in another dtype, that of x.
        """
        packed = self.packed if packed is None else packed
        if (adapters := self._adapters(x)) is None:
            return self._operations.linear(x, packed, bias, out_dtype=out_dtype)
        return self._operations.linear(x, packed, bias, out_dtype=out_dtype, adapters=adapters)

    def gated_linear(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """The gated product, as `Operations.gated_linear` computes it, with the adapters of the step's rows."""
        if (adapters := self._adapters(x)) is None:
            return self._operations.gated_linear(x, self.packed, activation=activation)
        return self._operations.gated_linear(x, self.packed, activation=activation, adapters=adapters)

    def record(self, program: Program, x: Rows, bias: torch.Tensor | None, *, into: str | Rows) -> Rows:
        """Append to a program what `linear` computes."""
        return program.linear(x, self.packed, bias, into=into, product=self._number)

    def record_gated(self, program: Program, x: Rows, activation: Activation, *, into: str | Rows) -> Rows:
        """Append to a program what `gated_linear` computes."""
        return program.gated_linear(x, self.packed, activation, into=into, product=self._number)

    def _adapters(self, x: torch.Tensor) -> RowAdapters | None:
        if self._rows.num_probed:
            self._num_rows.add(x.shape[0] - self._rows.num_probed)
            self._row_dtypes.add(x.dtype)
        if self._rows.slots is None or self._number is None:
            return None
        weights = self._rows.table.products[self._number]
        if all(one is None for one in weights):
            return None
        slots = self._rows.of_product(x.shape[0])
        return None if slots is None else RowAdapters(slots, weights)


class HasProducts(ABC):
    """A part of a model with products that adapters may change."""

    @property
    @abstractmethod
    def products(self) -> Sequence[AdaptableProduct]: ...


_NO_ROWS = RowsOfStep()
"""What a product that is not attached reads: no row has an adapter."""

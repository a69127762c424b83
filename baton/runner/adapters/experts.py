"""The products of a mixture of experts: its parts hold their weights as parameters, which adapters name as such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from baton.runner.adapters.adaptable import AdaptableProduct, RowsOfStep
from baton.runner.backends.low_rank import LowRank, Outputs, RowAdapters
from baton.runner.backends.operations import Activation, Operations


def routed(slots: torch.Tensor | None, index: torch.Tensor, num_rows: int) -> torch.Tensor | None:
    """The slots [rows] of the rows `index`, and -1 for padding up to `num_rows`; None: none of them has an adapter."""
    if slots is None:
        return None
    own = slots[index.cpu()]
    if int(own.max()) < 0:
        return None
    return own if len(own) == num_rows else functional.pad(own, (0, num_rows - len(own)), value=-1)


class AdaptableExperts:
    """One product of every expert of a mixture: gate and up, or down. An adapter has a part for each expert.

    Each expert computes the rows that were routed to it.
    """

    def __init__(self, operations: Operations, packed: Sequence[Any], num_outputs: int, num_inputs: int) -> None:
        """`packed`: the weight of each expert; of a gated product gate and up."""
        self.num_outputs = num_outputs
        self.num_inputs = num_inputs
        self.packed = packed
        self._operations = operations
        self._number: int | None = None
        self._rows = RowsOfStep()
        self._num_rows: set[int] = set()

    @property
    def num_experts(self) -> int:
        return len(self.packed)

    @property
    def computes_all_rows(self) -> bool:
        """Whether the experts got all rows of the step that was to find out, to be routed, once each."""
        return self._num_rows == {0}

    def attach(self, number: int, rows: RowsOfStep) -> None:
        """Give the product its number in tables of adapters, and the rows of the steps to come."""
        self._number, self._rows = number, rows

    def slots(self, num_rows: int) -> torch.Tensor | None:
        """Int32 [rows] on the CPU: the slots of the rows that are to be routed, or -1; None: no adapter is for these
        experts, or no row has one."""
        rows = self._rows
        if rows.num_probed:
            self._num_rows.add(num_rows - rows.num_probed)
        if rows.slots is None or self._number is None or all(one is None for one in rows.table.experts[self._number]):
            return None
        return rows.of_product(num_rows)

    def linear(
        self, x: torch.Tensor, expert: int, slots: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The product of one expert and rows with these slots [rows], or none, as `Operations.linear` computes it."""
        if (adapters := self._adapters(expert, slots)) is None:
            return self._operations.linear(x, self.packed[expert], bias)
        return self._operations.linear(x, self.packed[expert], bias, adapters=adapters)

    def gated_linear(
        self, x: torch.Tensor, expert: int, slots: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor:
        """The gated product of one expert and rows with these slots [rows], or none, as operations compute it."""
        if (adapters := self._adapters(expert, slots)) is None:
            return self._operations.gated_linear(x, self.packed[expert], activation=activation)
        return self._operations.gated_linear(x, self.packed[expert], activation=activation, adapters=adapters)

    def _adapters(self, expert: int, slots: torch.Tensor | None) -> RowAdapters | None:
        if slots is None or self._number is None:
            return None
        weights = [None if one is None else one[expert] for one in self._rows.table.experts[self._number]]
        return None if all(one is None for one in weights) else RowAdapters(slots, weights)

    def adapt(self, terms: Sequence[Sequence[LowRank]], dtype: torch.dtype) -> list[Any]:
        """Prepare what an adapter adds, for each expert, to products of rows in `dtype`."""
        return [
            self._operations.adapt(packed, of_expert, dtype) if of_expert else None
            for packed, of_expert in zip(self.packed, terms, strict=True)
        ]


def divided_among_experts(
    a: torch.Tensor, b: torch.Tensor, factor: float, num_experts: int, *, swapped: bool
) -> list[LowRank]:
    """The term of each expert in A [experts * rank, K] and B [outputs, rank * experts], as PEFT stacks them.

    In A the ranks of an expert are neighbours, in B those of all experts for one rank. `swapped`: A has the outputs and
    B the inputs, and what is added to an expert's weight is the transpose of B A.
    """
    of_a = a.view(num_experts, -1, a.shape[1])
    of_b = b.view(b.shape[0], -1, num_experts).permute(2, 0, 1)
    if swapped:
        of_a, of_b = of_b.transpose(1, 2), of_a.transpose(1, 2)
    return [
        LowRank(of_a[expert].contiguous(), factor, (Outputs(0, of_b[expert].contiguous()),))
        for expert in range(num_experts)
    ]


AdaptableParameters = Mapping[str, AdaptableProduct | AdaptableExperts | None]
"""What adapters may change in the parameters of a module, by their names and in the module's order; None: they must not
change this one."""


def hold_parameters(module: nn.Module, parameters: AdaptableParameters) -> None:
    """Say what adapters may change in a module whose parameters were packed."""
    object.__setattr__(module, "baton_parameters", parameters)


def held_parameters(module: nn.Module) -> AdaptableParameters:
    """What adapters may change in the parameters of a module; empty for one that has none."""
    held: AdaptableParameters = getattr(module, "baton_parameters", {})
    return held

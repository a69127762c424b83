"""A product of which each row chooses some weights, one of each expert that a router has chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.operations import Operations
from baton.runner.backends.routing import SharedRows
from baton.runner.model.stored.layers import ExpertsOnFile, held_experts, hold_experts, read_packed, take_experts


class ChosenProduct(nn.Module):
    """The products of rows and the weights of experts. Until `pack` is called, torch multiplies the plain numbers."""

    def __init__(self, operations: Operations, weights: torch.Tensor | ExpertsOnFile) -> None:
        """`weights` [experts, N, K]; they are not copied."""
        super().__init__()
        self._operations = operations
        if isinstance(weights, ExpertsOnFile):
            hold_experts(self, {"weight": weights.experts})
        else:
            self.weight = nn.Parameter(weights.detach(), requires_grad=False)
        _, self._n, self._k = weights.shape
        self._packed: Sequence[Any] = ()
        self._choice: Any = None
        """All weights for one call of `multiply_chosen`; None: they are multiplied one by one."""

    def pack(self, release: Callable[[nn.Module], None]) -> None:
        """Pack the weights, and forget the plain ones; `release` is called before."""
        if held := take_experts(self):
            self._packed = [self._operations.pack(*map(read_packed, stored)) for stored in held["weight"]]
        else:
            self._packed = [self._operations.pack(weight) for weight in self.weight.detach()]
            release(self)
            del self.weight
        self._choice = self._operations.pack_choice(self._packed)

    def rows(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor | None = None,
        shared: SharedRows | None = None,
    ) -> torch.Tensor:
        """What `Operations.multiply_chosen` computes of x [T, K], or [T, most * K], and int32 chosen [T, most]."""
        if self._choice is not None:
            return self._operations.multiply_chosen(x, chosen, self._choice, weights, shared)
        count, most = chosen.shape
        of_places = x.view(count, -1, self._k).expand(-1, most, -1)
        outs = x.new_empty(count, most, self._n)
        for expert in sorted({*chosen.flatten().tolist()}):
            at = (chosen == expert).nonzero(as_tuple=True)
            outs[at] = self._product(of_places[at], expert)
        if weights is None:
            return outs.view(count, -1)
        places = torch.arange(count * most, dtype=torch.int32, device=x.device).view(count, most)
        return self._operations.sum_experts(outs.view(count * most, -1), places, weights, 1.0, shared)

    def _product(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        if not self._packed:
            held = held_experts(self).get("weight")
            weights: Any = self.weight if held is None else ExpertsOnFile(held)
            return functional.linear(rows, weights[expert])
        return self._operations.linear(rows, self._packed[expert])

    def record(
        self,
        program: Program,
        x: Rows,
        chosen: Rows,
        weights: Rows | None = None,
        shared: torch.Tensor | None = None,
        *,
        into: str | Rows,
    ) -> Rows:
        """Append to a program what `rows` computes; `shared` is one row [1, N].

        Raises KernelArgumentError for weights that are multiplied one by one.
        """
        if self._choice is None:
            raise KernelArgumentError("x", "goes through experts that are multiplied one by one")
        return program.multiply_chosen(x, chosen, self._choice, weights, shared, into=into)

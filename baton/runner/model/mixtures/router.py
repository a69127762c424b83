"""The router of a mixture on Baton's operations, and experts that compute other rows than their router takes.

Most mixtures are one part of a layer, router and experts together (fused.py). Where the layer itself calls the router,
and then the experts with what the router gave, each is a part of its own, and Baton's loop computes both in one step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.operations import Operations
from baton.runner.backends.routing import Routing
from baton.runner.model.fused.rows import FusedNorm
from baton.runner.model.mixtures.experts import PackedExperts


class _Product(NamedTuple):
    """The product that gives a router's logits."""

    adaptable: AdaptableProduct
    packed: Any
    """Its weight in the dtype of the logits."""
    bias: torch.Tensor | None


class RoutingProduct:
    """A product that gives logits, and the choice of experts by them."""

    def __init__(
        self, operations: Operations, holder: nn.Module, path: str, routing: Routing, dtype: torch.dtype
    ) -> None:
        """`path`: in `holder`, of the module whose weight [num_experts, K] is packed later. `dtype`: of the logits."""
        self._operations = operations
        self._holder = holder
        self._path = path
        self._routing = routing
        self._dtype = dtype
        self._found: _Product | None = None

    @property
    def _product(self) -> _Product:
        if self._found is None:
            part: Any = self._holder.get_submodule(self._path)
            bias = getattr(part, "bias", None)
            bias = None if bias is None else bias.detach().to(self._dtype)
            # The router's part is a layer, or multiplies a weight itself (layers.py).
            adaptable, packed = part.product_in(self._dtype)
            self._found = _Product(adaptable, packed, bias)
        return self._found

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter of the step's rows changes the logits."""
        return self._product.adaptable.is_adapted

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of x [T, K] and their weights, as `Operations.route` gives them."""
        own = self._product
        logits = own.adaptable.linear(x.to(self._dtype), own.bias, packed=own.packed)
        return self._operations.route(logits, self._routing)

    def record(self, program: Program, x: Rows) -> tuple[Rows, Rows]:
        """Append to a program what `choose` computes, without adapters."""
        own = self._product
        wide = x if self._dtype == x.dtype else program.widened(x, into="wide rows")
        logits = program.linear(wide, own.packed, own.bias, into="logits of experts")
        return program.route(logits, self._routing, into="routed")


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What a router that is a part of its own computes, and what it gives."""

    product: str
    """The path of the module whose weight gives the logits."""
    routing: Routing
    logits_dtype: torch.dtype
    norm: FusedNorm | None
    """The norm of the rows before the product; None: there is none."""
    factor: float
    """What these rows are multiplied with."""
    num_given: int
    """How many things it gives, of which nobody reads any but these two."""
    chosen_at: int
    weights_at: int


class FusedRouter(nn.Module):
    """A router whose experts are another part of the layer. The children keep their names."""

    def __init__(self, operations: Operations, children: Mapping[str, nn.Module], parts: RouterParts) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self._parts = parts
        self._norm = parts.norm
        self._product = RoutingProduct(operations, self, parts.product, parts.routing, parts.logits_dtype)

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter of the step's rows changes the choice."""
        return self._product.is_adapted

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of x [T, K], contiguous: int32 [T, most], and their weights, float32."""
        rows = x if self._norm is None else self._norm.rows(x)
        return self._product.choose(rows if self._parts.factor == 1.0 else rows * self._parts.factor)

    def record(self, program: Program, x: Rows) -> tuple[Rows, Rows]:
        """Append to a program what `choose` computes, without adapters."""
        rows = x if self._norm is None else self._norm.record(program, x, into="rows of router")
        if self._parts.factor != 1.0:
            rows = program.scale(rows, self._parts.factor, into="scaled rows of router")
        return self._product.record(program, rows)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given: list[torch.Tensor | None] = [None] * self._parts.num_given
        chosen_and_weights = self.choose(x.reshape(-1, x.shape[-1]).contiguous())
        given[self._parts.chosen_at], given[self._parts.weights_at] = chosen_and_weights
        return tuple(given)


class RoutedExperts(nn.Module):
    """A router and experts, each of which takes its own rows."""

    def __init__(self, router: FusedRouter, experts: nn.Module) -> None:
        super().__init__()
        self._router = router
        self._experts = experts

    @property
    def _packed(self) -> PackedExperts:
        packed: PackedExperts = self._experts.baton_experts  # type: ignore[assignment]
        return packed

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter of the step's rows changes what programs compute without adapters."""
        return self._router.is_adapted or self._packed.is_adapted

    @property
    def most_recorded_rows(self) -> int:
        """The most rows of a step that a program computes: any number."""
        return sys.maxsize

    def rows(self, x: torch.Tensor, routed_by: torch.Tensor) -> torch.Tensor:
        """x [T, K] to [T, K], by the experts that the router chooses for the rows `routed_by` [T, K]."""
        return self._packed.compute(self._experts, x, *self._router.choose(routed_by))

    def record(self, program: Program, x: Rows, routed_by: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes. Raises KernelArgumentError for what programs can't."""
        mixture = self._packed.mixture
        if mixture is None:
            raise KernelArgumentError("x", "goes through experts that are multiplied one by one")
        return program.mix_experts(x, *self._router.record(program, routed_by), mixture, 1.0, None, None, into=into)

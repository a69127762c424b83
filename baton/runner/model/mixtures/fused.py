"""A mixture of experts on Baton's operations, in the place of a transformers module that computes the same."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.operations import Operations
from baton.runner.backends.routing import Routing, SharedRows
from baton.runner.model.fused.rows import FusedMlp, FusedNorm, PlainMlp
from baton.runner.model.mixtures.experts import PackedExperts
from baton.runner.model.mixtures.router import RoutingProduct


@dataclass(frozen=True, slots=True)
class MixtureParts:
    """The parts of a mixture by their names in the replaced module, and what it does with them."""

    router: str
    """The path of the module whose weight [num_experts, K] gives the logits."""
    experts: str
    routing: Routing
    logits_dtype: torch.dtype
    """In which the logits are computed."""
    shared: str | None = None
    """An MLP that computes every row."""
    shared_gate: str | None = None
    """A layer with one output, with whose sigmoid the shared rows are multiplied."""
    factor: float = 1.0
    """What the experts' sum is multiplied with before the shared rows are added."""
    result_factor: float = 1.0
    """What that sum is multiplied with."""
    norm: str | None = None
    """A norm of the result."""
    narrow: str | None = None
    """A layer that makes what experts are given; None: they are given the rows."""
    widen: str | None = None
    """A layer of the experts' sum, before shared rows are added; then these have no gate."""
    bias: torch.Tensor | None = None
    """[1, K]: a row that is added to the experts' sum; then there are no shared rows."""
    gives_tuple: bool = False
    """Whether the module gives more than rows, which nobody reads."""


class FusedMixture(nn.Module):
    """A router, the experts that it chooses, and what all rows share. The children keep their names."""

    def __init__(self, operations: Operations, children: Mapping[str, nn.Module], parts: MixtureParts) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.parts = parts
        self._router = RoutingProduct(operations, self, parts.router, parts.routing, parts.logits_dtype)

    @property
    def _packed_experts(self) -> PackedExperts:
        packed: PackedExperts = self.get_submodule(self.parts.experts).baton_experts  # type: ignore[assignment]
        return packed

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter of the step's rows changes what programs compute without adapters."""
        return self._router.is_adapted or self._packed_experts.is_adapted

    @property
    def most_recorded_rows(self) -> int:
        """The most rows of a step that a program computes: any number."""
        return sys.maxsize

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K], contiguous, to [T, K]."""
        parts = self.parts
        chosen, weights = self._router.choose(x)
        shared = None if parts.bias is None else SharedRows(parts.bias)
        if parts.shared is not None:
            gate = None if parts.shared_gate is None else self._layer(parts.shared_gate)
            shared = SharedRows(self._mlp(parts.shared).rows(x), None if gate is None else gate.rows(x))
        experts = self.get_submodule(parts.experts)
        given = x if parts.narrow is None else self._layer(parts.narrow).rows(x)
        of_experts = shared if parts.widen is None else None
        out = self._packed_experts.compute(experts, given, chosen, weights, parts.factor, of_experts)
        if parts.widen is not None:
            out = self._layer(parts.widen).rows(out)
            out = out if shared is None else out + shared.rows
        out = out if parts.result_factor == 1.0 else out * parts.result_factor
        return out if parts.norm is None else self._norm(parts.norm).rows(out)

    def record(self, program: Program, x: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes. Raises KernelArgumentError for what programs can't."""
        parts, mixture = self.parts, self._packed_experts.mixture
        if mixture is None:
            raise KernelArgumentError("x", "goes through experts that are multiplied one by one")
        chosen, weights = self._router.record(program, x)
        shared = gate = None
        if parts.shared is not None:
            shared = self._mlp(parts.shared).record(program, x, into="shared rows")
        if parts.shared_gate is not None:
            layer = self._layer(parts.shared_gate)
            gate = layer.record(program, x, into="shared gate")
        mixed = into if parts.norm is None and parts.result_factor == 1.0 else "mixed rows"
        given = x if parts.narrow is None else self._layer(parts.narrow).record(program, x, into="narrowed rows")
        if parts.widen is None:
            added = shared if parts.bias is None else parts.bias
            out = program.mix_experts(given, chosen, weights, mixture, parts.factor, added, gate, into=mixed)
        else:
            narrow = program.mix_experts(given, chosen, weights, mixture, parts.factor, None, None, into="narrow sums")
            out = self._layer(parts.widen).record(program, narrow, into=mixed if shared is None else "widened sums")
            out = out if shared is None else program.add(out, shared, 1.0, into=mixed)
        if parts.result_factor != 1.0:
            out = program.scale(out, parts.result_factor, into=into if parts.norm is None else "scaled mixed rows")
        return out if parts.norm is None else self._norm(parts.norm).record(program, out, into=into)

    def _layer(self, name: str) -> Any:
        """A linear layer, which is packed (layers.py)."""
        return self.get_submodule(name)

    def _mlp(self, name: str) -> FusedMlp | PlainMlp:
        part = self.get_submodule(name)
        assert isinstance(part, FusedMlp | PlainMlp)
        return part

    def _norm(self, name: str) -> FusedNorm:
        part = self.get_submodule(name)
        assert isinstance(part, FusedNorm)
        return part

    def forward(self, x: torch.Tensor) -> Any:
        out = self.rows(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)
        return (out, None) if self.parts.gives_tuple else out

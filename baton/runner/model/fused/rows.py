"""Norms, activations and MLPs on Baton's operations, each in the place of a transformers module that computes the same.

`forward` takes and returns what the replaced module does, so transformers' own loop can run them. `rows` computes the
same without the leading dimension of one, for Baton's loop (decoder.py), and `record` appends it to a program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from baton.runner.adapters.adaptable import AdaptableProduct, HasProducts
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.cpu.kernels.rows import RowActivation, Xielu
from baton.runner.backends.head_rows import HeadNorm
from baton.runner.backends.operations import Operations
from baton.runner.backends.weight_rows import Weight
from baton.runner.model.stored.layers import weight_of


class FusedNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, operations: Operations, weight: torch.Tensor, eps: float, plus_one: bool) -> None:
        super().__init__()
        self.rms_weight = weight.detach().clone()
        self.eps = eps
        self.plus_one = plus_one
        self._compute = operations.rms_norm
        self._add_compute = operations.add_rms_norm

    @property
    def weight(self) -> torch.Tensor:
        """What layers behind the norm ask for the dtype of their rows."""
        return self.rms_weight

    @property
    def width(self) -> int:
        """N."""
        return self.rms_weight.shape[0]

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x [..., N], which may be wider than the weight: the residual of mamba2 is float32."""
        return self._compute(x, self._weight_in(x.dtype), self.eps, plus_one=self.plus_one)

    def of_head(self, dtype: torch.dtype) -> HeadNorm:
        """The norm as `Operations.prepare_heads` takes it, for rows in `dtype`."""
        return HeadNorm(self._weight_in(dtype), self.eps, self.plus_one)

    def _weight_in(self, dtype: torch.dtype) -> torch.Tensor:
        return self.rms_weight if dtype == self.rms_weight.dtype else self.rms_weight.to(dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum x + residual, and the norm of that sum."""
        return self._add_compute(x, residual, self.rms_weight, self.eps, plus_one=self.plus_one)

    def record(self, program: Program, x: Rows, *, into: str | Rows) -> Rows:
        return program.rms_norm(x, self._weight_in(x.dtype), self.eps, plus_one=self.plus_one, into=into)

    def record_add(self, program: Program, x: Rows, residual: Rows, *, into: str | Rows) -> Rows:
        """Append the norm of x + residual to a program; the sum replaces the residual in its buffer."""
        return program.add_rms_norm(x, residual, self.rms_weight, self.eps, plus_one=self.plus_one, into=into)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x)


class FusedLayerNorm(nn.Module):
    """Norm over the last dimension around its mean."""

    def __init__(self, operations: Operations, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        """`weight`: [N], or [H, N] for rows of H heads with weights of their own."""
        super().__init__()
        self._weight = weight.detach().clone()
        self._bias = None if bias is None else bias.detach().clone()
        self._eps = eps
        self._operations = operations
        self._compute = operations.layer_norm

    @property
    def width(self) -> int:
        """N."""
        return self._weight.shape[-1]

    @property
    def num_heads(self) -> int | None:
        """H; None if all heads have the same weight."""
        return None if self._weight.ndim == 1 else self._weight.shape[0]

    def of_heads(self, own: range) -> FusedLayerNorm:
        """The norm of some of the heads, where each has a weight of its own."""
        return FusedLayerNorm(self._operations, self._weight[own.start : own.stop], self._bias, self._eps)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x [..., N]."""
        return self._compute(x, self._weight, self._bias, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum x + residual, and the norm of that sum."""
        total = x + residual
        return total, self.rows(total)

    def record(self, program: Program, x: Rows, *, into: str | Rows) -> Rows:
        return program.layer_norm(x, self._weight, self._bias, self._eps, into=into)

    def record_add(self, program: Program, x: Rows, residual: Rows, *, into: str | Rows) -> Rows:
        """Append the norm of x + residual to a program; the sum replaces the residual in its buffer."""
        return program.add_layer_norm(x, residual, self._weight, self._bias, self._eps, into=into)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x.contiguous())


class FusedActivation(nn.Module):
    """An activation that a layer itself applies."""

    def __init__(self, operations: Operations, activation: Activation) -> None:
        super().__init__()
        self._operations = operations
        self._activation = activation

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, N] to [T, N]."""
        return self._operations.activate(x, self._activation)

    def record(self, program: Program, x: Rows, *, into: str) -> Rows:
        return program.activate(x, self._activation, into=into)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)


class FusedMlp(nn.Module, HasProducts):
    """A gated MLP: down(act(gate(x)) * up(x)), with a norm of what goes into the last product, or with factors:
    down(act(gate(x) * one) * up(x)) * other."""

    def __init__(
        self,
        operations: Operations,
        gate: Weight,
        up: Weight,
        down: Weight,
        down_bias: torch.Tensor | None,
        activation: Activation,
        names: Sequence[str],
        norm: AnyNorm | None = None,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """`names`: of the linear layers of the replaced module: of gate and up, or both in one, and of down. `norm`: of
        what down takes. `factors`: of what the gate gives, and of the result; with a norm there are none."""
        super().__init__()
        # act(a * g) * u * b, of gate g and up u, is act(g') * u' * b / a, where g' and u' are those of a * x.
        self._of_x, self._of_inner = factors[0], factors[1] / factors[0]
        self._activation = activation
        self._norm = norm
        n, k = gate.shape
        *inner, last = names
        modules = [(name, 2 * n // len(inner)) for name in inner]
        self._gated = AdaptableProduct(operations, operations.pack_gated(gate, up), k, modules)
        self._down = AdaptableProduct.of_layer(operations, last, down)
        self._bias = None if down_bias is None else down_bias.detach() * factors[1]

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return self._gated, self._down

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] to [T, K]."""
        x = x if self._of_x == 1.0 else x * self._of_x
        inner = self._gated.gated_linear(x, self._activation)
        inner = inner if self._of_inner == 1.0 else inner * self._of_inner
        return self._down.linear(inner if self._norm is None else self._norm.rows(inner), self._bias)

    def record(self, program: Program, x: Rows, *, into: str) -> Rows:
        x = x if self._of_x == 1.0 else program.scale(x, self._of_x, into="scaled input")
        inner = self._gated.record_gated(program, x, self._activation, into="inner")
        inner = inner if self._of_inner == 1.0 else program.scale(inner, self._of_inner, into="scaled inner")
        if self._norm is not None:
            inner = self._norm.record(program, inner, into="normed inner")
        return self._down.record(program, inner, self._bias, into=into)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)


class SparseMlp(nn.Module, HasProducts):
    """A gated MLP whose gate passes what is far above its row's mean: down(act(max(0, gate(x) - cutoff)) * up(x)).

    The cutoff is the mean plus a multiple of the standard deviation (the Gaussian top-k of arXiv 2506.06644).
    """

    def __init__(
        self,
        operations: Operations,
        gate: Weight,
        up: Weight,
        down: Weight,
        activation: Activation,
        names: Sequence[str],
        deviations: float,
    ) -> None:
        """`names`: as of FusedMlp. `deviations`: how many standard deviations the cutoff is above the mean."""
        super().__init__()
        self._operations = operations
        self._activation = activation
        self._deviations = deviations
        n, k = gate.shape
        *inner, last = names
        modules = [(name, 2 * n // len(inner)) for name in inner]
        self._gate_up = AdaptableProduct(operations, operations.pack(gate, up), k, modules)
        self._down = AdaptableProduct.of_layer(operations, last, down)

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return self._gate_up, self._down

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] to [T, K]."""
        inner = self._operations.sparse_gate(self._gate_up.linear(x), self._deviations, self._activation)
        return self._down.linear(inner)

    def record(self, program: Program, x: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes."""
        both = self._gate_up.record(program, x, None, into="gate and up")
        inner = program.sparse_gate(both, self._deviations, self._activation, into="inner")
        return self._down.record(program, inner, None, into=into)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)


class PlainMlp(nn.Module, HasProducts):
    """An MLP without a gate: down(act(up(x)))."""

    def __init__(
        self,
        operations: Operations,
        up: nn.Linear,
        down: nn.Linear,
        activation: RowActivation | Callable[[torch.Tensor], torch.Tensor],
        names: Sequence[str],
        row_quantum: int,
    ) -> None:
        """`activation`: a known one, or a function that torch computes. `names`: of the linear layers of the replaced
        module. `row_quantum`: torch computes multiples of this many rows."""
        super().__init__()
        self._operations = operations
        self._activation = activation
        self._row_quantum = row_quantum
        weights = [weight_of(part) for part in (up, down)]
        self._up, self._down = (
            AdaptableProduct.of_layer(operations, name, weight) for name, weight in zip(names, weights, strict=True)
        )
        self._biases = [None if part.bias is None else part.bias.detach().clone() for part in (up, down)]

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return self._up, self._down

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] to [T, K]."""
        up_bias, down_bias = self._biases
        return self._down.linear(self._activated(self._up.linear(x, up_bias)), down_bias)

    def _activated(self, inner: torch.Tensor) -> torch.Tensor:
        if isinstance(self._activation, str | Xielu):
            return self._operations.activate(inner, self._activation)
        # torch's elementwise kernels round differently in the tail of a tensor, so only padding may be in the tail.
        padded = functional.pad(inner, (0, 0, 0, -inner.shape[0] % self._row_quantum))
        return self._activation(padded)[: inner.shape[0]].contiguous()

    def record(self, program: Program, x: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes. Raises KernelArgumentError for what torch computes of it."""
        if not isinstance(self._activation, str | Xielu):
            raise KernelArgumentError("x", "goes through an activation that torch computes")
        up_bias, down_bias = self._biases
        inner = self._up.record(program, x, up_bias, into="inner")
        activated = program.activate(inner, self._activation, into="activated")
        return self._down.record(program, activated, down_bias, into=into)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)


AnyNorm = FusedNorm | FusedLayerNorm

"""The recording of operations that treat each row alone: norms, gates, activations, sums and rotations (rows.py)."""

from __future__ import annotations

import torch

from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.call_structs import (
    ActivateCall,
    AddCall,
    Call,
    GateCall,
    GateKind,
    NormCall,
    OperationKind,
    RotateCall,
)
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.library import DTYPES
from baton.runner.backends.cpu.kernels.product import CLAMP, DIVIDE, SCALE
from baton.runner.backends.cpu.kernels.programs.recording import Recording
from baton.runner.backends.cpu.kernels.rows import (
    NO_LIMITS,
    GateActivation,
    GateFunction,
    Limits,
    RowActivation,
    activate_structure,
    gate_structure,
    multiply_structure,
    norm_structure,
)


class RowRecording(Recording):
    """Records what functions of the same names in rows.py compute."""

    def rms_norm(self, x: Rows, weight: torch.Tensor, eps: float, *, plus_one: bool, into: str | Rows) -> Rows:
        """Record the norm of each piece of x that is as wide as the weight (a row, or each of its heads).

        x may be float32; then the weight is, too.
        """
        return self._norm(x, None, self._norm_call(x, weight, None, eps, plus_one=plus_one), into)

    def add_rms_norm(
        self, x: Rows, residual: Rows, weight: torch.Tensor, eps: float, *, plus_one: bool, into: str | Rows
    ) -> Rows:
        """Record the sum of x and the residual, which replaces the residual, and the norm of the sum."""
        return self._norm(x, residual, self._norm_call(x, weight, None, eps, plus_one=plus_one), into)

    def layer_norm(
        self, x: Rows, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, into: str | Rows
    ) -> Rows:
        """Record the norm around its mean of each piece of x that is as wide as the weight [n], or [heads, n]."""
        return self._norm(x, None, self._norm_call(x, weight, bias, eps, around_mean=True), into)

    def add_layer_norm(
        self, x: Rows, residual: Rows, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, into: str | Rows
    ) -> Rows:
        """Record the sum of x and the residual, which replaces the residual, and the `layer_norm` of the sum."""
        return self._norm(x, residual, self._norm_call(x, weight, bias, eps, around_mean=True), into)

    def gated_rms_norm(
        self,
        x: Rows,
        gate: Rows,
        weight: torch.Tensor,
        eps: float,
        activation: GateActivation,
        *,
        gate_first: bool = False,
        into: str | Rows,
    ) -> Rows:
        """Record the norm of each piece of x that is as wide as the weight [n], times activation(gate), rounded once.

        A weight [pieces, n] has one for each piece. `gate_first`: x times activation(gate) is normed instead.
        """
        if (gate.width, gate.sampled) != (x.width, x.sampled):
            raise KernelArgumentError("gate", f"must be rows of {x.width}, as many as x has")
        call = self._norm_call(x, weight, None, eps)
        call.has_sigmoid_gate, call.gate_first = activation == "sigmoid", gate_first
        return self._norm(x, None, call, into, gate)

    def gate(
        self,
        x: Rows,
        function: GateFunction,
        bias: torch.Tensor | None,
        factor: torch.Tensor | None,
        limits: Limits = NO_LIMITS,
        scale: torch.Tensor | None = None,
        *,
        into: str,
    ) -> Rows:
        """Record the gates factor * function((x + bias) * scale), in float32; the others are float32 [n] or None.

        `limits`: between which the function's values are kept.
        """
        self._require_own(x)
        call = gate_structure(x.width, function, bias, factor, limits, scale)
        out = self._buffers.scratch(into, x.width, x.sampled, torch.float32)
        call.x_stride, call.out_stride = x.stride, out.stride
        self._kept += [bias, factor, scale]
        self._record(OperationKind.GATE, x, Call(gate=call), out=out)
        return out

    def widened(self, x: Rows, *, into: str) -> Rows:
        """Record x in float32."""
        self._require_own(x)
        call = GateCall(columns=x.width, x_stride=x.stride, out_stride=x.width, function=GateKind.PLAIN)
        out = self._buffers.scratch(into, x.width, x.sampled, torch.float32)
        self._record(OperationKind.GATE, x, Call(gate=call), out=out)
        return out

    def narrowed(self, x: Rows, *, into: str | Rows) -> Rows:
        """Record x, which is float32, rounded to the program's dtype."""
        if x.dtype != torch.float32:
            raise KernelArgumentError("x", f"must be float32, is {x.dtype}")
        out = self._out(into, x.width, x.sampled)
        call = GateCall(columns=x.width, x_stride=x.stride, out_stride=x.width, function=GateKind.NARROWED)
        self._record(OperationKind.GATE, x, Call(gate=call), out=out)
        return out

    def _require_own(self, x: Rows) -> None:
        if x.dtype != self._dtype:
            raise KernelArgumentError("x", f"must be {self._dtype}, is {x.dtype}")

    def multiply(self, x: Rows, by: Rows, activation: GateFunction | None, *, into: str | Rows) -> Rows:
        """Record x * activation(by), or without one x * by, rounded once; by may have one number for each head of x."""
        call = multiply_structure(x.width, by.width, x.stride, by.stride, activation)
        self._require_as_many(x, by, "by")
        out = self._out(into, x.width, x.sampled)
        self._record(OperationKind.MULTIPLY, x, Call(multiply=call), out=out, operands=(by,))
        return out

    def activate(self, x: Rows, activation: RowActivation, *, into: str | Rows) -> Rows:
        """Record activation(x), rounded once."""
        out = self._out(into, x.width, x.sampled)
        call = activate_structure(x.width, x.stride, activation)
        self._record(OperationKind.ACTIVATE, x, Call(activate=call), out=out)
        return out

    def clamp(self, x: Rows, bound: float, *, into: str | Rows) -> Rows:
        """Record x with the numbers beyond -bound and bound replaced by these."""
        out = self._out(into, x.width, x.sampled)
        call = ActivateCall(columns=x.width, x_stride=x.stride, activation=CLAMP, bound=bound)
        self._record(OperationKind.ACTIVATE, x, Call(activate=call), out=out)
        return out

    def scale(self, x: Rows, factor: float, *, divides: bool = False, into: str | Rows) -> Rows:
        """Record x * factor, or with `divides` x / factor, rounded once; `into` may be x. x may be float32."""
        out = self._out(into, x.width, x.sampled, x.dtype)
        activation = DIVIDE if divides else SCALE
        call = ActivateCall(columns=x.width, x_stride=x.stride, activation=activation, factor=factor)
        self._record(OperationKind.ACTIVATE, x, Call(activate=call), out=out, dtype=x.dtype)
        return out

    def add(self, one: Rows, other: Rows, factor: float, *, into: str | Rows) -> Rows:
        """Record one + other * factor, the product rounded and then the sum; `into` may be one of both.

        Both may be float32.
        """
        self._require_as_many(one, other, "other")
        if (other.width, one.stride, other.stride) != (one.width, one.width, one.width):
            raise KernelArgumentError("other", "and the rows to which it is added must be whole rows of one width")
        out = self._out(into, one.width, one.sampled, one.dtype)
        call = Call(add=AddCall(columns=one.width, factor=factor))
        self._record(OperationKind.ADD, one, call, out=out, operands=(other,), dtype=one.dtype)
        return out

    def rotate(self, x: Rows, head_dim: int, cos: Rows, sin: Rows, *, first: int = 0, in_pairs: bool = False) -> None:
        """Record a rotation, in place, of as many columns of each head of x as `cos` and `sin` have, from `first` on.

        These may be float32. `in_pairs`: each two neighbours belong together, and not the two halves.
        """
        if x.width % head_dim != 0 or cos.width % 2 != 0 or first + cos.width > head_dim or sin.width != cos.width:
            raise KernelArgumentError("cos", f"of {cos.width} columns can't rotate heads of {head_dim}")
        if cos.dtype not in (x.dtype, torch.float32) or sin.dtype != cos.dtype:
            raise KernelArgumentError("cos", f"is {cos.dtype}, and the rows {x.dtype}")
        call = RotateCall(
            heads=x.width // head_dim,
            half=cos.width // 2,
            token_stride=x.stride,
            head_stride=head_dim,
            angle_stride=cos.stride,
            angle_dtype=DTYPES[cos.dtype],
            in_pairs=in_pairs,
        )
        self._record(OperationKind.ROTATE, x.columns(first, x.width), Call(rotate=call), operands=(cos, sin))

    def _norm_call(
        self,
        x: Rows,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        *,
        plus_one: bool = False,
        around_mean: bool = False,
    ) -> NormCall:
        if weight.ndim not in (1, 2) or x.width % weight.shape[-1] or (weight.ndim == 2 and weight.numel() != x.width):
            raise KernelArgumentError(
                "weight", f"must be [n] with n a divisor of {x.width}, or [heads, n] of all heads"
            )
        self._kept += [weight, bias]
        return norm_structure(weight.shape, x.dtype, weight, bias, eps, plus_one=plus_one, around_mean=around_mean)

    def _norm(self, x: Rows, residual: Rows | None, call: NormCall, into: str | Rows, gate: Rows | None = None) -> Rows:
        if residual is not None and (
            x.width != residual.width or x.sampled != residual.sampled or residual.stride != residual.width
        ):
            raise KernelArgumentError("residual", "must be whole rows of x's shape")
        n = call.n
        out = self._out(into, x.width, x.sampled, x.dtype)
        call.columns, call.row_stride, call.column_stride = x.width // n, x.stride, n
        call.gate_row_stride, call.gate_column_stride = 0 if gate is None else gate.stride, n
        operands = (residual, residual, gate)
        self._record(OperationKind.NORM, x, Call(norm=call), out=out, operands=operands, dtype=x.dtype)
        return out

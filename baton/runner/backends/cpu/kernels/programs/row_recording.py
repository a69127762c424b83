"""The recording of operations that treat each row alone: norms, gates, activations, sums, streams and rotations.

rows.py computes them one by one.
"""

from __future__ import annotations

import math

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
    ResizeCall,
    RotateCall,
    StreamsCall,
    StreamsKind,
)
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.library import DTYPES
from baton.runner.backends.cpu.kernels.product import CLAMP, DIVIDE, SCALE, Activation
from baton.runner.backends.cpu.kernels.programs.recording import Recording
from baton.runner.backends.cpu.kernels.rows import (
    NO_LIMITS,
    GateActivation,
    GateFunction,
    Limits,
    RowActivation,
    activate_structure,
    gate_structure,
    in_dtype,
    multiply_structure,
    norm_structure,
    sparse_gate_structure,
    streams_structure,
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

    def multiply_columns(self, x: Rows, by: torch.Tensor, *, into: str | Rows) -> Rows:
        """Record x times the numbers by [n] of its columns, rounded once."""
        if by.shape != (x.width,) or by.dtype != self._dtype or not by.is_contiguous() or not by.is_cpu:
            raise KernelArgumentError("by", f"must be [{x.width}] {self._dtype}, contiguous, on the CPU")
        call = multiply_structure(x.width, x.width, x.stride, 0, None)
        call.by = by.data_ptr()
        out = self._out(into, x.width, x.sampled)
        self._kept.append(by)
        self._record(OperationKind.MULTIPLY, x, Call(multiply=call), out=out)
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
        width = one.width
        call = AddCall(columns=width, width=width, factor=factor)
        call.one_stride = call.other_stride = call.out_stride = width
        self._record(OperationKind.ADD, one, Call(add=call), out=out, operands=(other,), dtype=one.dtype)
        return out

    def add_to_columns(self, rows: Rows, other: Rows, columns: range) -> None:
        """Record that other is added, in place, to each piece of some columns of rows that is as wide as it is."""
        self._require_as_many(rows, other, "other")
        own = rows.columns(columns.start, columns.stop)
        if not other.width or own.width % other.width or columns.stop > rows.width:
            raise KernelArgumentError("other", f"of {other.width} columns has no place in {columns} of {rows.width}")
        call = AddCall(columns=own.width, width=other.width, factor=1.0)
        call.one_stride = call.out_stride = rows.stride
        call.other_stride = other.stride
        self._record(OperationKind.ADD, own, Call(add=call), out=own, operands=(other,))

    def mix_streams(self, x: Rows, factors: Rows, *, into: str | Rows) -> Rows:
        """Record that each stream of x has a sum of all of them added; a row has streams^2 factors."""
        streams = math.isqrt(factors.width)
        call = streams_structure(StreamsKind.MIXED, x.width, streams, factors.width)
        return self._streams(call, x, factors, None, x.width, into)

    def correct_streams(self, x: Rows, result: Rows, factors: Rows, active: int, *, into: str | Rows) -> Rows:
        """Record that (result - the active stream) * (factor + 1) is added to each stream of x, which has a factor."""
        call = streams_structure(StreamsKind.CORRECTED, x.width, factors.width, factors.width, active)
        if result.width != call.columns:
            raise KernelArgumentError("result", f"has {result.width} columns, a stream {call.columns}")
        return self._streams(call, x, factors, result, x.width, into)

    def mean_of_streams(self, x: Rows, streams: int, *, into: str | Rows) -> Rows:
        """Record the mean of the streams of x."""
        call = streams_structure(StreamsKind.AVERAGED, x.width, streams, 0)
        return self._streams(call, x, None, None, call.columns, into)

    def _streams(
        self, call: StreamsCall, x: Rows, factors: Rows | None, result: Rows | None, width: int, into: str | Rows
    ) -> Rows:
        out = self._out(into, width, x.sampled)
        call.x_stride = x.stride
        for other, name in ((factors, "factors"), (result, "result")):
            if other is not None:
                self._require_as_many(x, other, name)
        call.factors_stride = 0 if factors is None else factors.stride
        call.result_stride = 0 if result is None else result.stride
        if out.buffer == x.buffer:
            raise KernelArgumentError("into", "is where the streams are read")
        self._record(OperationKind.STREAMS, x, Call(streams=call), out=out, operands=(factors, result))
        return out

    def resize(self, x: Rows, like: Rows, least: float, out: Rows) -> None:
        """Record x * size(like) / size(x), each step rounded, into `out`, which may be some columns of a buffer.

        A row's size is the root of its mean square, which is at least `least` for x.
        """
        self._require_as_many(x, like, "like")
        self._require_as_many(x, out, "out")
        if not x.width == like.width == out.width:
            raise KernelArgumentError("like", f"has {like.width} columns, x {x.width}, and out {out.width}")
        call = ResizeCall(columns=x.width, x_stride=x.stride, like_stride=like.stride, out_stride=out.stride)
        call.least = in_dtype(least, self._dtype)
        self._record(OperationKind.RESIZE, x, Call(resize=call), out=out, operands=(like,))

    def sparse_gate(self, x: Rows, deviations: float, activation: Activation, *, into: str | Rows) -> Rows:
        """Record activation(max(0, g - cutoff)) * u of rows with g beside u, rounded once.

        The cutoff is the mean of a row's g plus `deviations` times their standard deviation.
        """
        call = sparse_gate_structure(x.width, x.stride, deviations, activation)
        out = self._out(into, call.columns, x.sampled)
        self._record(OperationKind.SPARSE_GATE, x, Call(sparse_gate=call), out=out)
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

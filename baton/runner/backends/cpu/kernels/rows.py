"""Kernels that treat each row alone: norms, gates, products, activations, streams and rotary position embeddings."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from baton.runner.backends.cpu.kernels.call_structs import (
    ActivateCall,
    GateCall,
    GateKind,
    Multiplier,
    MultiplyCall,
    NormCall,
    ResizeCall,
    SparseGateCall,
    StreamsCall,
    StreamsKind,
)
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.library import DTYPES, check_status, library
from baton.runner.backends.cpu.kernels.product import ACTIVATIONS, TANH, XIELU, Activation

GateFunction = Literal["softplus", "sigmoid"]
GateActivation = Literal["silu", "sigmoid"]
Limits = tuple[float, float]
NO_LIMITS: Limits = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Xielu:
    """An activation with numbers of a layer's own (xIELU, arXiv 2411.13010).

    Above 0 it is positive * x^2 + linear * x, and elsewhere negative * (e^min(x, near) - 1 - x) + linear * x.
    """

    positive: float
    negative: float
    linear: float
    near: float

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """What the kernel computes, by torch and in x's dtype."""
        bent = torch.expm1(x.clamp(max=self.near)) - x
        return torch.where(x > 0, self.positive * x * x, self.negative * bent) + self.linear * x


RowActivation = Activation | Xielu | Literal["tanh"]
"""An activation of rows that no product gates."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False, threads: int
) -> torch.Tensor:
    """Divide x [..., n] by its root mean square and multiply it by the weight [n]: contiguous, in x's dtype.

    Computed in float32. Without `plus_one` the quotient is rounded before it is multiplied by the weight (as in llama);
    with it, it is multiplied by 1 + weight and rounded once (as in gemma). There may be gaps between the rows of x.
    Raises KernelArgumentError for tensors that don't fit.
    """
    return _norm(x, None, None, norm_structure(x.shape[-1:], x.dtype, weight, None, eps, plus_one=plus_one), threads)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    threads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum x + residual in their dtype, and the `rms_norm` of the sum; the residual is contiguous, of x's shape."""
    if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous() or not residual.is_cpu:
        raise KernelArgumentError("residual", f"must be {tuple(x.shape)} {x.dtype}, contiguous, on the CPU")
    call = norm_structure(x.shape[-1:], x.dtype, weight, None, eps, plus_one=plus_one)
    total = x.new_empty(x.shape)
    return total, _norm(x, residual, total, call, threads)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, threads: int
) -> torch.Tensor:
    """The norm of x [..., n] around its mean, times the weight [n], plus bias [n]: contiguous, in x's dtype.

    The weight may be [heads, n], for x [..., heads, n]. Computed in float32 and rounded once. Raises
    KernelArgumentError for tensors that don't fit.

    Ba et al. 2016, "Layer Normalization".
    """
    last = x.shape[-1:] if weight.ndim < 2 else x.shape[-2:]
    return _norm(x, None, None, norm_structure(last, x.dtype, weight, bias, eps, around_mean=True), threads)


def norm_structure(
    shape: Sequence[int],
    dtype: torch.dtype,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    plus_one: bool = False,
    around_mean: bool = False,
) -> NormCall:
    """The kernel's arguments for norms of n numbers, without those of x; `shape`: the weight's, [n] or [heads, n]."""
    if weight.shape != shape or weight.dtype != dtype or not weight.is_contiguous() or not weight.is_cpu:
        raise KernelArgumentError("weight", f"must be {list(shape)} {dtype}, contiguous, on the CPU")
    n = shape[-1]
    if bias is not None and (bias.shape != (n,) or bias.dtype != dtype or not bias.is_contiguous() or not bias.is_cpu):
        raise KernelArgumentError("bias", f"must be [{n}] {dtype}, contiguous, on the CPU")
    return NormCall(
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        n=n,
        weight_stride=n if len(shape) > 1 else 0,
        eps=eps,
        plus_one=plus_one,
        around_mean=around_mean,
    )


def _norm(
    x: torch.Tensor, residual: torch.Tensor | None, total: torch.Tensor | None, call: NormCall, threads: int
) -> torch.Tensor:
    """The norm of x or, with a residual, of their sum, which is written to `total`."""
    if x.ndim == 0 or x.dtype not in DTYPES or not x.is_cpu:
        raise KernelArgumentError("x", f"must be [..., n] of float32 or bfloat16 on the CPU, is {x.dtype}")
    shape, n = x.shape, call.n
    if n > 1 and x.stride(-1) != 1:
        raise KernelArgumentError("x", "has rows that are not contiguous")
    if x.is_contiguous():
        columns = shape[-2] if call.weight_stride else 1
        rows, row_stride, column_stride = x.numel() // max(n * columns, 1), n * columns, n
    else:
        apart = [(size, stride) for size, stride in zip(shape[:-1], x.stride()[:-1], strict=True) if size != 1]
        if len(apart) > 2 or (call.weight_stride and x.ndim > 3):
            return _norm(x.contiguous(), residual, total, call, threads)
        (columns, column_stride), (rows, row_stride) = [*reversed(apart), (1, 0), (1, 0)][:2]
    out = x.new_empty(shape)
    call.x, call.out = x.data_ptr(), out.data_ptr()
    if residual is not None and total is not None:
        call.residual, call.sum = residual.data_ptr(), total.data_ptr()
    call.rows, call.columns, call.row_stride, call.column_stride = rows, columns, row_stride, column_stride
    lib = library()
    check_status(lib.norm(lib.isa, DTYPES[x.dtype], ctypes.byref(call), threads))
    return out


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: GateActivation,
    *,
    gate_first: bool = False,
    threads: int,
) -> torch.Tensor:
    """The root mean square norm of x [rows, heads, n], times weight and activation(gate), of x's shape: contiguous.

    `weight`: [n], or [heads, n] of each head. `gate_first`: x times activation(gate) is normed instead. Computed in
    float32 and rounded once. Each row of x and gate is contiguous, with gaps between rows allowed. Raises
    KernelArgumentError for tensors that don't fit.
    """
    for name, rows in (("x", x), ("gate", gate)):
        if rows.ndim != 3 or rows.dtype not in DTYPES or not rows.is_cpu:
            raise KernelArgumentError(
                name, f"must be [rows, heads, n] of float32 or bfloat16 on the CPU, is {rows.dtype}"
            )
        if (rows.stride(2) != 1 and rows.shape[2] > 1) or (rows.stride(1) != rows.shape[2] and rows.shape[1] > 1):
            raise KernelArgumentError(name, "has rows that are not contiguous")
    num_rows, heads, n = x.shape
    if gate.shape != x.shape or gate.dtype != x.dtype:
        raise KernelArgumentError("gate", f"must be {tuple(x.shape)} {x.dtype}")
    if (
        weight.shape not in ((n,), (heads, n))
        or weight.dtype != x.dtype
        or not weight.is_contiguous()
        or not weight.is_cpu
    ):
        raise KernelArgumentError("weight", f"must be [{n}] or [{heads}, {n}] {x.dtype}, contiguous, on the CPU")
    out = x.new_empty(x.shape)
    call = NormCall(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        gate=gate.data_ptr(),
        rows=num_rows,
        columns=heads,
        n=n,
        row_stride=x.stride(0),
        column_stride=n,
        gate_row_stride=gate.stride(0),
        gate_column_stride=n,
        weight_stride=n if weight.ndim == 2 else 0,
        eps=eps,
        has_sigmoid_gate=activation == "sigmoid",
        gate_first=gate_first,
    )
    lib = library()
    check_status(lib.norm(lib.isa, DTYPES[x.dtype], ctypes.byref(call), threads))
    return out


def gate(
    x: torch.Tensor,
    function: GateFunction,
    bias: torch.Tensor | None,
    factor: torch.Tensor | None,
    limits: Limits = NO_LIMITS,
    scale: torch.Tensor | None = None,
    *,
    threads: int,
) -> torch.Tensor:
    """The gates factor * function((x + bias) * scale) of x [rows, n], in float32: [rows, n].

    `bias`, `factor`, `scale`: float32 [n] or None. `limits`: between which the function's values are kept. Each row of
    x is contiguous. Raises KernelArgumentError for tensors that don't fit.
    """
    _require_rows(x, "x")
    rows, n = x.shape
    call = gate_structure(n, function, bias, factor, limits, scale)
    # The dtype is named, since another thread that loads a model changes the default.
    out = torch.empty(rows, n, dtype=torch.float32)
    call.x, call.out, call.rows, call.x_stride, call.out_stride = x.data_ptr(), out.data_ptr(), rows, x.stride(0), n
    lib = library()
    check_status(lib.gate(lib.isa, DTYPES[x.dtype], ctypes.byref(call), threads))
    return out


def gate_structure(
    n: int,
    function: GateFunction,
    bias: torch.Tensor | None,
    factor: torch.Tensor | None,
    limits: Limits,
    scale: torch.Tensor | None,
) -> GateCall:
    """The kernel's arguments for n gates, without those of a step."""
    for name, of_gates in (("bias", bias), ("factor", factor), ("scale", scale)):
        if of_gates is None:
            continue
        if of_gates.shape != (n,) or of_gates.dtype != torch.float32 or not of_gates.is_contiguous():
            raise KernelArgumentError(name, f"must be [{n}] torch.float32, contiguous, is {tuple(of_gates.shape)}")
        if not of_gates.is_cpu:
            raise KernelArgumentError(name, "must be on the CPU")
    return GateCall(
        bias=None if bias is None else bias.data_ptr(),
        scale=None if scale is None else scale.data_ptr(),
        factor=None if factor is None else factor.data_ptr(),
        columns=n,
        low=limits[0],
        high=limits[1],
        function=GateKind[function.upper()],
    )


def multiply(x: torch.Tensor, by: torch.Tensor, activation: GateFunction | None, *, threads: int) -> torch.Tensor:
    """x * activation(by), or without one x * by, of x [rows, n] and by [rows, n] in x's dtype: contiguous.

    by may be [rows, heads], with one number for each n / heads columns of x. Computed in float32 and rounded once. Each
    row of x and by is contiguous, with gaps between rows allowed. Raises KernelArgumentError for tensors that don't
    fit.
    """
    _require_rows(x, "x")
    _require_rows(by, "by")
    if by.shape[0] != x.shape[0] or by.dtype != x.dtype:
        raise KernelArgumentError("by", f"must be {tuple(x.shape)} {x.dtype}")
    call = multiply_structure(x.shape[1], by.shape[1], x.stride(0), by.stride(0), activation)
    out = x.new_empty(x.shape)
    call.x, call.by, call.out, call.rows = x.data_ptr(), by.data_ptr(), out.data_ptr(), x.shape[0]
    lib = library()
    check_status(lib.multiply(lib.isa, DTYPES[x.dtype], ctypes.byref(call), threads))
    return out


def multiply_structure(
    n: int, num_multipliers: int, x_stride: int, by_stride: int, activation: GateFunction | None
) -> MultiplyCall:
    """The kernel's arguments for rows of n columns and so many multipliers, without those of a step."""
    if num_multipliers != n and (num_multipliers == 0 or n % num_multipliers):
        raise KernelArgumentError("by", f"must be rows of {n}, or of a divisor of it, and as many as x has")
    width = n // num_multipliers if n else 1
    multiplier = Multiplier.PLAIN if activation is None else Multiplier[activation.upper()]
    return MultiplyCall(columns=n, width=width, x_stride=x_stride, by_stride=by_stride, multiplier=multiplier)


def activate(x: torch.Tensor, activation: RowActivation, *, threads: int) -> torch.Tensor:
    """activation(x) of x [rows, n], in x's dtype: contiguous.

    Computed in float32 and rounded once. Each row of x is contiguous, with gaps between rows allowed. Raises
    KernelArgumentError for a tensor that doesn't fit.
    """
    _require_rows(x, "x")
    call = activate_structure(x.shape[1], x.stride(0), activation)
    out = x.new_empty(x.shape)
    call.x, call.out, call.rows = x.data_ptr(), out.data_ptr(), x.shape[0]
    lib = library()
    check_status(lib.activate(lib.isa, DTYPES[x.dtype], ctypes.byref(call), threads))
    return out


def activate_structure(n: int, x_stride: int, activation: RowActivation) -> ActivateCall:
    """The kernel's arguments for rows of n columns, without those of a step."""
    if isinstance(activation, Xielu):
        return ActivateCall(columns=n, x_stride=x_stride, activation=XIELU, **asdict(activation))
    return ActivateCall(columns=n, x_stride=x_stride, activation={**ACTIVATIONS, "tanh": TANH}[activation])


def mix_streams(x: torch.Tensor, factors: torch.Tensor, *, threads: int) -> torch.Tensor:
    """Each stream of x [rows, streams * n] plus a sum of all of them, by factors [rows, streams^2]: of x's shape.

    A stream has `streams` factors. The sum is added up in float32, one stream after the other, and rounded, and then
    the streams are. Each row of all arguments is contiguous. Raises KernelArgumentError for tensors that don't fit.
    """
    streams = math.isqrt(factors.shape[-1])
    call = streams_structure(StreamsKind.MIXED, x.shape[-1], streams, streams * streams)
    return _of_streams(call, x, factors, None, x.shape[-1], threads)


def correct_streams(
    x: torch.Tensor, result: torch.Tensor, factors: torch.Tensor, active: int, *, threads: int
) -> torch.Tensor:
    """Each stream of x [rows, streams * n] plus (result - the active one) * (factor + 1): of x's shape.

    `result`: [rows, n]; `factors`: [rows, streams]; `active`: its stream's place. Each step is rounded. Each row of all
    arguments is contiguous. Raises KernelArgumentError for tensors that don't fit.
    """
    streams = factors.shape[-1]
    call = streams_structure(StreamsKind.CORRECTED, x.shape[-1], streams, streams, active)
    return _of_streams(call, x, factors, result, x.shape[-1], threads)


def mean_of_streams(x: torch.Tensor, streams: int, *, threads: int) -> torch.Tensor:
    """The mean of the streams of x [rows, streams * n], added up in float32 one after the other: [rows, n].

    Each row of x is contiguous. Raises KernelArgumentError for tensors that don't fit.
    """
    call = streams_structure(StreamsKind.AVERAGED, x.shape[-1], streams, 0)
    return _of_streams(call, x, None, None, call.columns, threads)


def streams_structure(kind: StreamsKind, width: int, streams: int, num_factors: int, active: int = 0) -> StreamsCall:
    """The kernel's arguments for rows of `width` columns, without those of a step, and their strides."""
    expected = {StreamsKind.MIXED: streams * streams, StreamsKind.CORRECTED: streams, StreamsKind.AVERAGED: 0}[kind]
    if streams < 1 or width % streams or num_factors != expected or not 0 <= active < streams:
        raise KernelArgumentError("factors", f"of {num_factors} columns are not those of streams in rows of {width}")
    return StreamsCall(kind=kind, streams=streams, columns=width // streams, active=active)


def _of_streams(
    call: StreamsCall,
    x: torch.Tensor,
    factors: torch.Tensor | None,
    result: torch.Tensor | None,
    width: int,
    threads: int,
) -> torch.Tensor:
    """What the kernel computes, rows of a width."""
    _require_rows(x, "x")
    for name, of_rows, columns in (("factors", factors, None), ("result", result, call.columns)):
        if of_rows is None:
            continue
        _require_rows(of_rows, name)
        if of_rows.shape[0] != x.shape[0] or of_rows.dtype != x.dtype or columns not in (None, of_rows.shape[1]):
            raise KernelArgumentError(name, f"must be as many rows as x has, in {x.dtype}")
    out = x.new_empty(x.shape[0], width)
    call.x, call.out, call.rows, call.x_stride = x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0)
    if factors is not None:
        call.factors, call.factors_stride = factors.data_ptr(), factors.stride(0)
    if result is not None:
        call.result, call.result_stride = result.data_ptr(), result.stride(0)
    lib = library()
    check_status(lib.streams(lib.isa, DTYPES[x.dtype], ctypes.byref(call), threads))
    return out


def row_means(x: torch.Tensor, *, threads: int) -> torch.Tensor:
    """The mean of each row of x [rows, n], added up in float32 and rounded once: [rows, 1].

    Each row is contiguous. Raises KernelArgumentError for a tensor that doesn't fit.
    """
    return _resized(ResizeCall(), x, None, 1, threads)


def resize(x: torch.Tensor, like: torch.Tensor, least: float, *, threads: int) -> torch.Tensor:
    """x * size(like) / size(x) of x and like [rows, n]: contiguous. A row's size is the root of its mean square.

    `least`: what the mean square of x is at least. Each step is rounded; means are those of `row_means`. Each row of
    both is contiguous. Raises KernelArgumentError for tensors that don't fit.
    """
    _require_rows(like, "like")
    if like.shape != x.shape or like.dtype != x.dtype:
        raise KernelArgumentError("like", f"must be {tuple(x.shape)} {x.dtype}")
    return _resized(ResizeCall(least=in_dtype(least, x.dtype)), x, like, x.shape[1], threads)


def in_dtype(number: float, dtype: torch.dtype) -> float:
    """A number, rounded to a dtype."""
    return float(torch.tensor(number, dtype=dtype))


def _resized(call: ResizeCall, x: torch.Tensor, like: torch.Tensor | None, width: int, threads: int) -> torch.Tensor:
    """What the kernel computes, rows of a width."""
    _require_rows(x, "x")
    out = x.new_empty(x.shape[0], width)
    call.x, call.out, call.rows, call.columns = x.data_ptr(), out.data_ptr(), *x.shape
    call.x_stride, call.out_stride = x.stride(0), width
    if like is not None:
        call.like, call.like_stride = like.data_ptr(), like.stride(0)
    lib = library()
    check_status(lib.resize(lib.isa, DTYPES[x.dtype], ctypes.byref(call), threads))
    return out


def sparse_gate(x: torch.Tensor, deviations: float, activation: Activation, *, threads: int) -> torch.Tensor:
    """activation(max(0, g - cutoff)) * u of x [rows, 2 n], each row g and then u: [rows, n].

    The cutoff is the mean of the row's g plus `deviations` times their standard deviation. Computed in float32 and
    rounded once. Each row is contiguous. Raises KernelArgumentError for a tensor that doesn't fit.
    """
    _require_rows(x, "x")
    call = sparse_gate_structure(x.shape[1], x.stride(0), deviations, activation)
    out = x.new_empty(x.shape[0], call.columns)
    call.x, call.out, call.rows = x.data_ptr(), out.data_ptr(), x.shape[0]
    lib = library()
    check_status(lib.sparse_gate(lib.isa, DTYPES[x.dtype], ctypes.byref(call), threads))
    return out


def sparse_gate_structure(width: int, x_stride: int, deviations: float, activation: Activation) -> SparseGateCall:
    """The kernel's arguments for rows of `width` columns, without those of a step."""
    if width % 2:
        raise KernelArgumentError("x", f"has {width} columns, no two halves")
    return SparseGateCall(
        columns=width // 2, x_stride=x_stride, deviations=deviations, activation=ACTIVATIONS[activation]
    )


def _require_rows(x: torch.Tensor, name: str) -> None:
    if x.ndim != 2 or x.dtype not in DTYPES or not x.is_cpu:
        raise KernelArgumentError(name, f"must be [rows, n] of float32 or bfloat16 on the CPU, is {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise KernelArgumentError(name, "has rows that are not contiguous")


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, in_pairs: bool = False, threads: int) -> None:
    """Rotate the first r columns of x [tokens, heads, d] in place; columns i and i + r / 2 are a pair with one angle.

    `in_pairs`: each two neighbours are one instead. `cos` and `sin` are [tokens, r] in x's dtype or float32, and their
    two halves are equal. Computed in float32 and rounded once.
    There may be gaps between the tokens and the heads of x. Raises KernelArgumentError for tensors that don't fit.

    Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    if x.ndim != 3 or x.dtype not in DTYPES or not x.is_cpu:
        raise KernelArgumentError("x", f"must be [tokens, heads, d] of float32 or bfloat16 on the CPU, is {x.dtype}")
    tokens, heads, d = x.shape
    token_stride, head_stride, last_stride = x.stride()
    if last_stride != 1 and d > 1:
        raise KernelArgumentError("x", "has rows that are not contiguous")
    if cos.ndim != 2 or cos.shape[0] != tokens or cos.shape[1] % 2 != 0 or cos.shape[1] > d:
        raise KernelArgumentError("cos", f"must be [{tokens}, r] with an even r up to {d}, is {tuple(cos.shape)}")
    if cos.dtype not in (x.dtype, torch.float32) or not cos.is_contiguous() or not cos.is_cpu:
        raise KernelArgumentError("cos", f"must be {x.dtype} or float32, contiguous, on the CPU")
    if sin.shape != cos.shape or sin.dtype != cos.dtype or not sin.is_contiguous() or not sin.is_cpu:
        raise KernelArgumentError("sin", f"must be {tuple(cos.shape)} {cos.dtype}, contiguous, on the CPU")
    r = cos.shape[1]
    lib = library()
    check_status(
        lib.rotate(
            lib.isa,
            DTYPES[x.dtype],
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            tokens,
            heads,
            r // 2,
            token_stride,
            head_stride,
            r,
            DTYPES[cos.dtype],
            in_pairs,
            threads,
        )
    )

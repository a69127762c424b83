"""Kernels that treat each row alone: root mean square norms and rotary position embeddings."""

from __future__ import annotations

import torch

from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.library import DTYPES, check_status, library


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False, threads: int
) -> torch.Tensor:
    """Divide x [..., n] by its root mean square and multiply it by the weight [n]: contiguous, in x's dtype.

    Computed in float32. Without `plus_one` the quotient is rounded before it is multiplied by the weight (as in llama);
    with it, it is multiplied by 1 + weight and rounded once (as in gemma). There may be gaps between the rows of x.
    Raises KernelArgumentError for tensors that don't fit.
    """
    return _norm(x, None, None, weight, eps, plus_one, threads)


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
    total = x.new_empty(x.shape)
    return total, _norm(x, residual, total, weight, eps, plus_one, threads)


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    total: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    plus_one: bool,
    threads: int,
) -> torch.Tensor:
    if x.ndim == 0 or x.dtype not in DTYPES or not x.is_cpu:
        raise KernelArgumentError("x", f"must be [..., n] of float32 or bfloat16 on the CPU, is {x.dtype}")
    shape = x.shape
    n = shape[-1]
    if weight.shape != (n,) or weight.dtype != x.dtype or not weight.is_contiguous() or not weight.is_cpu:
        raise KernelArgumentError("weight", f"must be [{n}] {x.dtype}, contiguous, on the CPU")
    if n > 1 and x.stride(-1) != 1:
        raise KernelArgumentError("x", "has rows that are not contiguous")
    if x.is_contiguous():
        rows, columns, row_stride, column_stride = x.numel() // max(n, 1), 1, n, 0
    else:
        apart = [(size, stride) for size, stride in zip(shape[:-1], x.stride()[:-1], strict=True) if size != 1]
        if len(apart) > 2:
            return _norm(x.contiguous(), residual, total, weight, eps, plus_one, threads)
        (columns, column_stride), (rows, row_stride) = [*reversed(apart), (1, 0), (1, 0)][:2]
    out = x.new_empty(shape)
    lib = library()
    check_status(
        lib.rms_norm(
            lib.isa,
            DTYPES[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            None if residual is None else residual.data_ptr(),
            None if total is None else total.data_ptr(),
            out.data_ptr(),
            rows,
            columns,
            n,
            row_stride,
            column_stride,
            eps,
            plus_one,
            threads,
        )
    )
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, threads: int) -> None:
    """Rotate the first r columns of x [tokens, heads, d] in place; columns i and i + r / 2 are a pair with one angle.

    `cos` and `sin` are [tokens, r] in x's dtype, and their two halves are equal. Computed in float32 and rounded once.
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
    if cos.dtype != x.dtype or not cos.is_contiguous() or not cos.is_cpu:
        raise KernelArgumentError("cos", f"must be {x.dtype}, contiguous, on the CPU")
    if sin.shape != cos.shape or sin.dtype != x.dtype or not sin.is_contiguous() or not sin.is_cpu:
        raise KernelArgumentError("sin", f"must be {tuple(cos.shape)} {x.dtype}, contiguous, on the CPU")
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
            threads,
        )
    )

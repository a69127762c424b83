"""Linear layers on packed weights: every row's bits depend on the row alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.engine.runner.kernels.errors import KernelArgumentError
from baton.engine.runner.kernels.library import DTYPES, check_status, library


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [n, k] rearranged in panels of 16 columns. The original is not kept."""

    n: int
    k: int
    padded_k: int
    """Columns of x that a product reads; those past k are zero."""
    dtype: torch.dtype
    storage: torch.Tensor
    """[elements], padded with zeros."""


def pack(weight: torch.Tensor) -> PackedWeight:
    """Rearrange a weight [n, k] of float32 or bfloat16 for `linear`.

    Raises KernelArgumentError for another shape or dtype, KernelsUnavailable without the library.
    """
    _require_matrix("weight", weight)
    lib = library()
    n, k = weight.shape
    dtype = DTYPES[weight.dtype]
    weight = weight.detach().contiguous()
    storage = torch.empty(lib.functions.baton_packed_size(dtype, n, k), dtype=weight.dtype)
    lib.functions.baton_pack(dtype, weight.data_ptr(), storage.data_ptr(), n, k)
    return PackedWeight(n, k, lib.functions.baton_padded_k(dtype, k), weight.dtype, storage)


def linear(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [m, k] times the weight [n, k] transposed, plus bias [n]: [m, n] in x's dtype.

    Sums in float32, each output over k in one fixed order whatever m, the row's place and the number of threads; the
    bias is added before rounding. Raises KernelArgumentError for shapes or dtypes that don't fit.
    """
    _require_matrix("x", x)
    if x.dtype != w.dtype:
        raise KernelArgumentError("x", f"is {x.dtype}, the weight {w.dtype}")
    m, k = x.shape
    if k != w.k:
        raise KernelArgumentError("x", f"has {k} columns, the weight {w.k}")
    if not x.is_contiguous():
        raise KernelArgumentError("x", "is not contiguous")
    if bias is not None and (
        bias.shape != (w.n,) or bias.dtype != x.dtype or not bias.is_contiguous() or not bias.is_cpu
    ):
        raise KernelArgumentError("bias", f"must be [{w.n}] {x.dtype}, contiguous, on the CPU")
    lib = library()
    out = torch.empty((m, w.n), dtype=x.dtype)
    if w.padded_k != k:
        x = functional.pad(x, (0, w.padded_k - k))
    check_status(
        lib.functions.baton_linear(
            lib.isa,
            DTYPES[x.dtype],
            x.data_ptr(),
            w.storage.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            m,
            w.n,
            w.padded_k,
            torch.get_num_threads(),
        )
    )
    return out


def _require_matrix(name: str, tensor: torch.Tensor) -> None:
    if tensor.ndim != 2:
        raise KernelArgumentError(name, f"must have two dimensions, has {tensor.ndim}")
    if tensor.dtype not in DTYPES:
        raise KernelArgumentError(name, f"must be float32 or bfloat16, is {tensor.dtype}")
    if not tensor.is_cpu:
        raise KernelArgumentError(name, f"must be on the CPU, is on {tensor.device}")

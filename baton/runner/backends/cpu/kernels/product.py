"""Linear layers on packed weights in x's dtype. A row of the result depends on the row of x and the weight alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch.nn import functional

from baton.runner.backends.cpu.kernels.adapters import ProductAdapters
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.huge_pages import zeros_for_reading
from baton.runner.backends.cpu.kernels.library import DTYPES, check_status, library
from baton.runner.backends.cpu.kernels.packing import gated_columns, place_gated, place_stacked

Activation = Literal["silu", "gelu", "gelu_tanh"]

NOT_GATED = 0
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [n, k], rearranged in groups of 64 columns (csrc/kernels.h)."""

    n: int
    """Number of columns of a product's result."""
    k: int
    """Number of columns of x."""
    padded_k: int
    """Number of columns of x that a product reads; those behind k are zero."""
    dtype: torch.dtype
    gated: bool
    """Whether `pack_gated` made it, for `gated_linear`."""
    storage: torch.Tensor
    """The packed elements in one dimension, padded with zeros."""
    address: int
    """The address of the storage."""
    isa: int
    """Number of the instruction set for which it is packed, and which computes its products."""


def pack(*weights: torch.Tensor) -> PackedWeight:
    """Pack weights [n_i, k] of one dtype (float32 or bfloat16), stacked over their outputs, for `linear`.

    Raises KernelArgumentError for other shapes or dtypes, and KernelsUnavailable without the library.
    """
    n = sum(weight.shape[0] for weight in weights)
    packed = _empty_packed(weights, n, n, gated=False)
    place_stacked(weights, partial(_place, packed))
    return packed


def pack_gated(gate: torch.Tensor, up: torch.Tensor) -> PackedWeight:
    """Pack two weights [n, k] for `gated_linear`; raises the same errors as `pack`."""
    if gate.shape != up.shape:
        raise KernelArgumentError("up", f"is {tuple(up.shape)}, the gate {tuple(gate.shape)}")
    n = gate.shape[0]
    packed = _empty_packed((gate, up), n, gated_columns(n), gated=True)
    place_gated(gate, up, partial(_place, packed))
    return packed


def take_rows(w: PackedWeight, index: torch.Tensor, *, threads: int = 1) -> torch.Tensor:
    """The rows `index` (int64 [rows]) of the stacked weights, with the bits that `pack` was given: [rows, k].

    Raises KernelArgumentError for an index outside of the weight.
    """
    out = torch.empty((index.shape[0], w.k), dtype=w.dtype)
    check_status(
        library().take_rows(
            w.isa, DTYPES[w.dtype], w.address, index.data_ptr(), out.data_ptr(), index.shape[0], w.n, w.k, threads
        )
    )
    return out


def linear(
    x: torch.Tensor,
    w: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    threads: int,
    out: torch.Tensor | None = None,
    adapters: ProductAdapters | None = None,
) -> torch.Tensor:
    """The product of x [m, k] and the weight [n, k] transposed, plus bias [n]: [m, n].

    The result is in x's dtype, or in that of `out`, which may be float32 to keep the sums unrounded. Sums are float32.
    Each output is summed over k in one fixed order, which does not depend on m, on the row's index or on the number of
    threads. What the rows' adapters add, and the bias, is added before rounding. There may be gaps between the rows of
    x. Raises KernelArgumentError for tensors that don't fit.
    """
    if w.gated:
        raise KernelArgumentError("w", "is gated: use gated_linear")
    bias_address = None if bias is None else require_bias(bias, w.n, w.dtype)
    return _multiply(x, w, bias_address, NOT_GATED, threads, out, adapters)


def gated_linear(
    x: torch.Tensor,
    w: PackedWeight,
    *,
    activation: Activation,
    threads: int,
    adapters: ProductAdapters | None = None,
) -> torch.Tensor:
    """The gated product activation(x gateᵀ) * (x upᵀ): x [m, k] to [m, n] in x's dtype.

    Activation and product are computed from the float32 sums and rounded once. The rest is as in `linear`.
    """
    if not w.gated:
        raise KernelArgumentError("w", "is not gated: use pack_gated")
    if activation not in ACTIVATIONS:
        raise KernelArgumentError("activation", f"must be one of {', '.join(ACTIVATIONS)}, is {activation}")
    return _multiply(x, w, None, ACTIVATIONS[activation], threads, None, adapters)


def require_bias(bias: torch.Tensor, n: int, dtype: torch.dtype) -> int:
    """The address of a bias for `n` outputs; raises KernelArgumentError for a tensor that is not one."""
    if bias.shape != (n,) or bias.dtype != dtype or not bias.is_contiguous() or not bias.is_cpu:
        raise KernelArgumentError("bias", f"must be [{n}] {dtype}, contiguous, on the CPU")
    return bias.data_ptr()


def empty_rows(num_rows: int, k: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Memory for rows of a quantised weight, made plain: [num_rows, k]. Raises KernelArgumentError for other dtypes."""
    if dtype not in DTYPES:
        raise KernelArgumentError("dtype", f"of a quantised weight's rows must be float32 or bfloat16, is {dtype}")
    return torch.empty((num_rows, k), dtype=dtype)


def require_input(x: torch.Tensor, k: int) -> None:
    """Raises KernelArgumentError unless x is [m, k] in float32 or bfloat16, as `require_rows` says, on the CPU."""
    if x.ndim != 2 or x.dtype not in DTYPES or not x.is_cpu:
        raise KernelArgumentError(
            "x", f"must be [m, {k}] of float32 or bfloat16 on the CPU, is {tuple(x.shape)} {x.dtype}"
        )
    require_rows(x, k)


def require_rows(x: torch.Tensor, k: int) -> None:
    """Raises KernelArgumentError unless x is [m, k], each of its rows contiguous and none in another's memory."""
    if x.shape[1] != k:
        raise KernelArgumentError("x", f"has {x.shape[1]} columns, the weight {k}")
    stride, one = x.stride()
    if one != 1 and k > 1:
        raise KernelArgumentError("x", "has rows that are not contiguous")
    if x.shape[0] > 1 and stride < k:
        raise KernelArgumentError("x", "has rows that overlap")


def _multiply(
    x: torch.Tensor,
    w: PackedWeight,
    bias: int | None,
    activation: int,
    threads: int,
    out: torch.Tensor | None,
    adapters: ProductAdapters | None,
) -> torch.Tensor:
    if x.ndim != 2 or x.dtype != w.dtype or not x.is_cpu:
        raise KernelArgumentError("x", f"must be [m, {w.k}] {w.dtype} on the CPU, is {tuple(x.shape)} {x.dtype}")
    if x.shape[1] == w.k != w.padded_k:
        x = functional.pad(x, (0, w.padded_k - w.k))
        require_rows(x, w.padded_k)
    else:
        require_rows(x, w.k)
    return multiply_packed(x, w, 0, bias, activation, threads, out, adapters)


class _PackedWhole(Protocol):
    """What a call needs to know of a packed weight."""

    @property
    def n(self) -> int: ...
    @property
    def padded_k(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def isa(self) -> int: ...


def multiply_packed(
    x: torch.Tensor,
    w: _PackedWhole,
    scale_group: int,
    bias: int | None,
    activation: int,
    threads: int,
    out: torch.Tensor | None,
    adapters: ProductAdapters | None,
) -> torch.Tensor:
    """Call the library for a product whose arguments were checked: x [m, padded_k] to [m, n].

    `scale_group`: of a weight in float8, else 0; `bias`: its address; `activation`: a number of ACTIVATIONS.
    """
    if out is None:
        out = x.new_empty((x.shape[0], w.n))
    lib = library()
    status = lib.linear(
        w.isa,
        DTYPES[x.dtype],
        x.data_ptr(),
        w.address,
        bias,
        out.data_ptr(),
        x.shape[0],
        w.n,
        w.padded_k,
        scale_group,
        x.stride(0),
        out.stride(0),
        activation,
        DTYPES[out.dtype],
        threads,
        None if adapters is None else adapters.address,
    )
    if status:
        check_status(status)
    return out


def _empty_packed(weights: tuple[torch.Tensor, ...], n: int, columns: int, *, gated: bool) -> PackedWeight:
    """An empty packed weight with `n` outputs in `columns` columns; raises KernelArgumentError for bad weights."""
    for name, weight in (("weight" if i == 0 else f"weight {i}", weight) for i, weight in enumerate(weights)):
        if weight.ndim != 2:
            raise KernelArgumentError(name, f"must have two dimensions, has {weight.ndim}")
        if weight.dtype not in DTYPES:
            raise KernelArgumentError(name, f"must be float32 or bfloat16, is {weight.dtype}")
        if not weight.is_cpu:
            raise KernelArgumentError(name, f"must be on the CPU, is on {weight.device}")
        if weight.dtype != weights[0].dtype or weight.shape[1] != weights[0].shape[1]:
            raise KernelArgumentError(name, f"is {tuple(weight.shape)} {weight.dtype}, unlike the first")
    if not weights:
        raise KernelArgumentError("weights", "must be at least one weight")
    lib = library()
    k, dtype = weights[0].shape[1], weights[0].dtype
    code = DTYPES[dtype]
    storage = zeros_for_reading(lib.functions.baton_packed_size(code, columns, k), dtype)
    return PackedWeight(n, k, lib.functions.baton_padded_k(code, k), dtype, gated, storage, storage.data_ptr(), lib.isa)


def _place(packed: PackedWeight, weight: torch.Tensor, first: int, spread: int) -> None:
    weight = weight.detach().contiguous()
    library().functions.baton_pack(
        packed.isa, DTYPES[packed.dtype], weight.data_ptr(), packed.address, weight.shape[0], packed.k, first, spread
    )

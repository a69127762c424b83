"""Weights packed in x's dtype, and what products with packed weights of all kinds share.

A row of the result depends on the row of x and the weight alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar, overload

import torch
from torch.nn import functional

from baton.runner.backends.cpu.kernels.adapters import ProductAdapters
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.huge_pages import zeros_for_reading
from baton.runner.backends.cpu.kernels.library import DTYPES, check_status, library
from baton.runner.backends.quantized_weight import Float8Weight, QuantizedWeight

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]

_GROUP = 64
"""Columns of a group of packed memory (csrc/kernels.h)."""
NOT_GATED = 0
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4, "relu_squared": 5}
CLAMP = 6
SCALE = 7
DIVIDE = 8
XIELU = 9
TANH = 10


@dataclass(frozen=True, slots=True)
class Ungated:
    """What experts without a gate compute of their first product."""

    activation: Activation


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """A weight [n, k] of floating-point numbers, rearranged in groups of 64 columns."""

    n: int
    """Number of columns of a product's result."""
    k: int
    """Number of columns of x."""
    padded_k: int
    """Number of columns of x that a product reads; those behind k are zero."""
    gated: bool
    """Whether it is a gate and an up, for `gated_linear`."""
    storage: torch.Tensor
    """The packed elements in one dimension, padded with zeros; of float8 uint8, with the scales."""
    address: int
    """The address of the storage."""
    isa: int
    """Number of the instruction set for which it is packed, and which computes its products."""


@dataclass(frozen=True, slots=True)
class PackedWeight(PackedColumns):
    """A weight in x's dtype (csrc/kernels.h)."""

    dtype: torch.dtype

    def rows(self, index: torch.Tensor, dtype: torch.dtype | None, threads: int) -> torch.Tensor:
        """The rows `index` (int64 [rows]) of the stacked weights, with the bits that `pack` was given: [rows, k]."""
        out = torch.empty((index.shape[0], self.k), dtype=self.dtype)
        kind, places, into = DTYPES[self.dtype], index.data_ptr(), out.data_ptr()
        check_status(
            library().take_rows(self.isa, kind, self.address, places, into, index.shape[0], self.n, self.k, threads)
        )
        return out

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        activation: int,
        threads: int,
        out: torch.Tensor | None,
        adapters: ProductAdapters | None,
    ) -> torch.Tensor:
        """The product of x [m, k] in this dtype and the weight transposed: [m, n] in x's dtype or that of `out`.

        `activation`: a number of ACTIVATIONS. Raises KernelArgumentError for tensors that don't fit.
        """
        bias_address = None if bias is None else require_bias(bias, self.n, self.dtype)
        if x.ndim != 2 or x.dtype != self.dtype or not x.is_cpu:
            actual = f"{tuple(x.shape)} {x.dtype}"
            raise KernelArgumentError("x", f"must be [m, {self.k}] {self.dtype} on the CPU, is {actual}")
        if x.shape[1] == self.k != self.padded_k:
            x = functional.pad(x, (0, self.padded_k - self.k))
            require_rows(x, self.padded_k)
        else:
            require_rows(x, self.k)
        return multiply_packed(x, self, 0, bias_address, activation, threads, out, adapters)


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


@dataclass(frozen=True, slots=True)
class PackedHeads(Sequence[PackedWeight]):
    """The weights of heads, all of one shape, at equal distances in memory. A slice of them is such weights, too."""

    first: PackedWeight
    num_heads: int
    apart: int
    """Elements from head to head."""

    def __len__(self) -> int:
        return self.num_heads

    @overload
    def __getitem__(self, head: int) -> PackedWeight: ...

    @overload
    def __getitem__(self, head: slice) -> PackedHeads: ...

    def __getitem__(self, head: int | slice) -> PackedWeight | PackedHeads:
        if isinstance(head, slice):
            start, stop, step = head.indices(self.num_heads)
            return PackedHeads(self._at(start), len(range(start, stop, step)), self.apart * step)
        if not -self.num_heads <= head < self.num_heads:
            raise IndexError(head)
        return self._at(head % self.num_heads)

    def _at(self, head: int) -> PackedWeight:
        return replace(self.first, address=self.first.address + head * self.apart * self.first.dtype.itemsize)


def pack_heads(weights: Sequence[torch.Tensor]) -> PackedHeads:
    """Pack weights of heads [n, k], all of one shape, for `linear_of_heads`; raises the same errors as `pack`."""
    n = weights[0].shape[0]
    # Every head begins with a group of columns.
    packed = pack(*(functional.pad(weight, (0, 0, 0, -n % _GROUP)) for weight in weights))
    return PackedHeads(replace(packed, n=n), len(weights), packed.n // len(weights) * packed.padded_k)


def linear_of_heads(x: torch.Tensor, weights: PackedHeads, out: torch.Tensor, *, threads: int) -> None:
    """Write the products of rows x [m, heads, k] and the heads' weights transposed to `out` [m, heads, n].

    There may be gaps between the heads of a row. Raises KernelArgumentError for tensors that don't fit.
    """
    w = weights.first
    for name, rows, width in (("x", x, w.k), ("out", out, w.n)):
        if rows.ndim != 3 or rows.shape[1:] != (len(weights), width) or rows.dtype != w.dtype or not rows.is_cpu:
            shape = f"[m, {len(weights)}, {width}] {w.dtype} on the CPU"
            raise KernelArgumentError(name, f"must be {shape}, is {tuple(rows.shape)} {rows.dtype}")
        if rows.stride(2) != 1 and width > 1:
            raise KernelArgumentError(name, "has rows that are not contiguous")
    if out.shape[0] != x.shape[0]:
        raise KernelArgumentError("out", f"has {out.shape[0]} rows, x {x.shape[0]}")
    row, head, _ = out.stride()
    if head < w.n or (out.shape[0] > 1 and row < (len(weights) - 1) * head + w.n):
        raise KernelArgumentError("out", "has rows that overlap")
    if w.padded_k != w.k:
        x = functional.pad(x, (0, w.padded_k - w.k))
    lib = library()
    status = lib.linear_of_heads(
        w.isa,
        DTYPES[w.dtype],
        x.data_ptr(),
        w.address,
        out.data_ptr(),
        len(weights),
        x.shape[0],
        w.n,
        w.padded_k,
        x.stride(0),
        out.stride(0),
        x.stride(1),
        weights.apart,
        out.stride(1),
        threads,
    )
    if status:
        check_status(status)


_PANEL = 16
"""Columns of a panel of packed memory (csrc/kernels.h)."""
W = TypeVar("W", torch.Tensor, QuantizedWeight, Float8Weight)


def place_stacked(weights: Iterable[W], place: Callable[[W, int, int], None]) -> None:
    """Place weights [n_i, k] one behind the other in packed memory.

    `place(weight, first, spread)` writes the rows of a weight to packed columns: the first 16 from column `first` on,
    and each further 16 `spread` panels behind those before them.
    """
    first = 0
    for weight in weights:
        place(weight, first, 1)
        first += weight.shape[0]


def gated_columns(n: int) -> int:
    """The number of packed columns of a gate and an up with n outputs each."""
    return -(-n // _PANEL) * 2 * _PANEL


def place_gated(gate: W, up: W, place: Callable[[W, int, int], None]) -> None:
    """Place two weights [n, k] so that their panels take turns."""
    place(gate, 0, 2)
    place(up, _PANEL, 2)


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
    stride, last_stride = x.stride()
    if last_stride != 1 and k > 1:
        raise KernelArgumentError("x", "has rows that are not contiguous")
    if x.shape[0] > 1 and stride < k:
        raise KernelArgumentError("x", "has rows that overlap")


def multiply_packed(
    x: torch.Tensor,
    w: PackedColumns,
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
    padded_k = lib.functions.baton_padded_k(code, k)
    return PackedWeight(n, k, padded_k, gated, storage, storage.data_ptr(), lib.isa, dtype)


def _place(packed: PackedWeight, weight: torch.Tensor, first: int, spread: int) -> None:
    weight = weight.detach().contiguous()
    library().functions.baton_pack(
        packed.isa, DTYPES[packed.dtype], weight.data_ptr(), packed.address, weight.shape[0], packed.k, first, spread
    )

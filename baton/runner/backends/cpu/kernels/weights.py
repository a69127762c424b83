"""Packed weights of every kind: in x's dtype, in integers or float8, or stacked from weights of different kinds.

These functions are the face of product.py, quantized.py and float8.py, and choose between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import torch

from baton.runner.backends.cpu.kernels import product
from baton.runner.backends.cpu.kernels.adapters import KernelAdapter, ProductAdapters, adapt_part
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.float8 import (
    PackedFloat8Weight,
    pack_float8,
    pack_gated_float8,
    packed_group,
)
from baton.runner.backends.cpu.kernels.product import ACTIVATIONS, NOT_GATED, Activation, PackedWeight
from baton.runner.backends.cpu.kernels.quantized import (
    PackedQuantizedWeight,
    format_of,
    pack_gated_quantized,
    pack_quantized,
)
from baton.runner.backends.low_rank import LowRank, RowAdapters, parts_of
from baton.runner.backends.quantized_weight import Float8Weight, NarrowWeight, QuantizedWeight

Weight: TypeAlias = torch.Tensor | NarrowWeight
PackedPart: TypeAlias = PackedWeight | PackedQuantizedWeight | PackedFloat8Weight


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Packed weights of one k whose kinds or formats differ: each part computes its own columns of the result."""

    parts: tuple[PackedPart, ...]
    n: int
    """Number of columns of a product's result."""
    k: int
    """Number of columns of x."""
    gated: bool = False


Packed: TypeAlias = PackedPart | StackedWeight


def pack(*weights: Weight) -> Packed:
    """Pack weights [n_i, k], stacked over their outputs, for `linear`: tensors of one dtype, or quantised weights.

    Neighbours of one format are packed together. Raises KernelArgumentError for other shapes or dtypes, and for a
    quantised weight whose groups have no packed form; KernelsUnavailable without the library.
    """
    if not weights:
        raise KernelArgumentError("weights", "must be at least one weight")
    for i, weight in enumerate(weights):
        if len(weight.shape) == 2 and weight.shape[1] != weights[0].shape[-1]:
            raise KernelArgumentError(f"weight {i}", f"is {tuple(weight.shape)}, unlike the first")
    formats = [_format_of(weight) for weight in weights]
    parts: list[PackedPart] = []
    for _, alike in groupby(zip(formats, weights, strict=True), key=lambda pair: pair[0]):
        parts.append(_pack_alike([weight for _, weight in alike]))
    return parts[0] if len(parts) == 1 else StackedWeight(tuple(parts), sum(part.n for part in parts), parts[0].k)


def pack_gated(gate: Weight, up: Weight) -> PackedPart:
    """Pack two weights [n, k] of one kind for `gated_linear`; raises the same errors as `pack`."""
    if isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor):
        return product.pack_gated(gate, up)
    if isinstance(gate, QuantizedWeight) and isinstance(up, QuantizedWeight):
        return pack_gated_quantized(gate, up)
    if isinstance(gate, Float8Weight) and isinstance(up, Float8Weight):
        return pack_gated_float8(gate, up)
    raise KernelArgumentError("up", "must be of the gate's kind: plain, in integers, or in float8")


def take_rows(w: Packed, index: torch.Tensor, dtype: torch.dtype | None = None, *, threads: int = 1) -> torch.Tensor:
    """The rows `index` (int64 [rows]) of the stacked weights, with the bits that `pack` was given: [rows, k].

    Those of a quantised weight are dequantised to `dtype`. Raises KernelArgumentError for an index outside of the
    weight, and for a gated weight.
    """
    if w.gated:
        raise KernelArgumentError("w", "is gated: its rows can't be taken")
    if index.ndim != 1 or index.dtype != torch.int64 or not index.is_cpu or not index.is_contiguous():
        raise KernelArgumentError("index", "must be int64 [rows], contiguous, on the CPU")
    if not isinstance(w, StackedWeight):
        return w.rows(index, dtype, threads)
    if ((index < 0) | (index >= w.n)).any():
        raise KernelArgumentError("index", "names a row outside the weight")
    out = torch.empty((index.shape[0], w.k), dtype=dtype)
    for first, part in columns_of(w.parts):
        places = ((index >= first) & (index < first + part.n)).nonzero().flatten()
        out[places] = part.rows(index[places] - first, dtype, threads)
    return out


def linear(
    x: torch.Tensor,
    w: Packed,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    threads: int,
    adapters: RowAdapters | None = None,
) -> torch.Tensor:
    """The product of x [m, k] and the weight [n, k] transposed, plus bias [n]: [m, n].

    The result is in `out_dtype`: x's dtype (None), or float32, which keeps the sums unrounded. Sums are float32, each
    in one fixed order of k, whatever m, the row's index and the number of threads are. For a weight in integers, x
    is quantised; adapters compute from x itself. Raises KernelArgumentError for tensors that don't fit.
    """
    if out_dtype not in (None, x.dtype, torch.float32):
        raise KernelArgumentError("out_dtype", f"must be {x.dtype} or float32, is {out_dtype}")
    out = x.new_empty((x.shape[0], w.n), dtype=out_dtype)
    if w.gated:
        raise KernelArgumentError("w", "is gated: use gated_linear")
    if not isinstance(w, StackedWeight):
        return w.multiply(x, bias, NOT_GATED, threads, out, _part_adapters(adapters, 0, x))
    if bias is not None:
        product.require_bias(bias, w.n, x.dtype)
    for index, (first, part) in enumerate(columns_of(w.parts)):
        columns, own_bias = out[:, first : first + part.n], None if bias is None else bias[first : first + part.n]
        part.multiply(x, own_bias, NOT_GATED, threads, columns, _part_adapters(adapters, index, x))
    return out


def gated_linear(
    x: torch.Tensor, w: Packed, *, activation: Activation, threads: int, adapters: RowAdapters | None = None
) -> torch.Tensor:
    """The gated product activation(x gateᵀ) * (x upᵀ): x [m, k] to [m, n] in x's dtype.

    Activation and product are computed from the float32 sums and rounded once. The rest is as in `linear`.
    """
    if not w.gated or isinstance(w, StackedWeight):
        raise KernelArgumentError("w", "is not gated: use pack_gated")
    if activation not in ACTIVATIONS:
        raise KernelArgumentError("activation", f"must be one of {', '.join(ACTIVATIONS)}, is {activation}")
    return w.multiply(x, None, ACTIVATIONS[activation], threads, None, _part_adapters(adapters, 0, x))


def adapt(w: Packed, terms: Sequence[LowRank], dtype: torch.dtype) -> tuple[KernelAdapter | None, ...]:
    """Prepare what an adapter adds to products of rows in `dtype` with a packed weight, for each of its parts."""
    if not isinstance(w, StackedWeight):
        return (adapt_part(terms, w.n, w.k, gated=w.gated, dtype=dtype),)
    return tuple(
        adapt_part(parts_of(terms, [(first, first + part.n)]), part.n, w.k, gated=False, dtype=dtype)
        for first, part in columns_of(w.parts)
    )


def _part_adapters(of_rows: RowAdapters | None, part: int, x: torch.Tensor) -> ProductAdapters | None:
    return None if of_rows is None else ProductAdapters(of_rows, part, x.shape[0])


def columns_of(parts: Sequence[PackedPart]) -> list[tuple[int, PackedPart]]:
    """Each part with the first column of the result that it computes."""
    columns, first = [], 0
    for part in parts:
        columns.append((first, part))
        first += part.n
    return columns


def _format_of(weight: Weight) -> object:
    """A value that is equal for weights that can be packed together."""
    if isinstance(weight, QuantizedWeight):
        return format_of(weight)
    return packed_group(weight) if isinstance(weight, Float8Weight) else None


def _pack_alike(weights: list[Weight]) -> PackedPart:
    integers = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if integers:
        return pack_quantized(*integers)
    floats = [weight for weight in weights if isinstance(weight, Float8Weight)]
    if floats:
        return pack_float8(*floats)
    return product.pack(*(weight for weight in weights if isinstance(weight, torch.Tensor)))

"""Linear layers on weights in float8, which stay that small in memory.

Pieces of the weight are widened to the dtype of x while a product is computed, so that x is not rounded
(csrc/float8.h).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from baton.runner.backends.cpu.kernels.adapters import ProductAdapters
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.huge_pages import zeros_for_reading
from baton.runner.backends.cpu.kernels.library import DTYPES, check_status, library
from baton.runner.backends.cpu.kernels.product import (
    PackedColumns,
    empty_rows,
    gated_columns,
    multiply_packed,
    place_gated,
    place_stacked,
    require_bias,
    require_input,
)
from baton.runner.backends.quantized_weight import GROUP_MULTIPLE, Float8Weight


@dataclass(frozen=True, slots=True)
class PackedFloat8Weight(PackedColumns):
    """A weight in float8 (csrc/float8.h)."""

    group: int
    """How many elements of k share a scale; padded_k at least where a row has one scale."""

    def rows(self, index: torch.Tensor, dtype: torch.dtype | None, threads: int) -> torch.Tensor:
        """The rows `index` (int64 [rows]) of the stacked weights in a dtype: [rows, k], as Float8Weight.dequantized."""
        out = empty_rows(index.shape[0], self.k, dtype)
        check_status(
            library().functions.baton_float8_rows(
                self.isa,
                DTYPES[out.dtype],
                self.group,
                self.address,
                index.data_ptr(),
                out.data_ptr(),
                index.shape[0],
                self.n,
                self.k,
                self.padded_k,
                threads,
            )
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
        """Multiply as `PackedWeight.multiply` does, for x in float32 or bfloat16."""
        require_input(x, self.k)
        if self.padded_k != self.k:
            x = functional.pad(x, (0, self.padded_k - self.k))
        bias_address = None if bias is None else require_bias(bias, self.n, x.dtype)
        return multiply_packed(x, self, self.group, bias_address, activation, threads, out, adapters)


def packed_group(weight: Float8Weight, name: str = "weight") -> int:
    """The size of the groups in which a weight is packed. Weights of one such size and one k can be stacked.

    Raises KernelArgumentError for a weight that has no packed format.
    """
    codes, scales, group = weight.codes, weight.scales, weight.group
    if codes.dtype != torch.float8_e4m3fn or codes.ndim != 2 or not codes.is_cpu:
        raise KernelArgumentError(f"{name}'s codes", f"must be float8_e4m3fn [n, k] on the CPU, are {codes.dtype}")
    n, k = weight.shape
    if group < 1 or (group < k and group % GROUP_MULTIPLE != 0):
        raise KernelArgumentError(
            name,
            f"has groups of {group}, neither a multiple of {GROUP_MULTIPLE} nor whole rows: load the model with "
            "--dequantize",
        )
    if scales.dtype != torch.float32 or scales.shape != (n, -(-k // group)) or not scales.is_cpu:
        raise KernelArgumentError(
            f"{name}'s scales", f"must be float32 {(n, -(-k // group))}, are {scales.dtype} {tuple(scales.shape)}"
        )
    return group if group < k else _whole_row(k)


def pack_float8(*weights: Float8Weight) -> PackedFloat8Weight:
    """Pack weights [n_i, k] with groups of one size, stacked over their outputs.

    Raises KernelArgumentError for others.
    """
    n = sum(weight.shape[0] for weight in weights)
    packed = _empty_packed(weights, n, n, gated=False)
    place_stacked(weights, partial(_place, packed))
    return packed


def pack_gated_float8(gate: Float8Weight, up: Float8Weight) -> PackedFloat8Weight:
    """Pack two weights [n, k] for a gated product; if their groups differ, in the largest that fit into both."""
    if gate.shape != up.shape:
        raise KernelArgumentError("up", f"is {tuple(up.shape)}, the gate {tuple(gate.shape)}")
    groups = packed_group(gate, "gate"), packed_group(up, "up")
    if groups[0] != groups[1]:
        row_bytes = _whole_row(gate.shape[1])
        group = min(groups) if row_bytes in groups else math.gcd(*groups)
        gate, up = gate.in_groups(group), up.in_groups(group)
    n = gate.shape[0]
    packed = _empty_packed((gate, up), n, gated_columns(n), gated=True)
    place_gated(gate, up, partial(_place, packed))
    return packed


def _whole_row(k: int) -> int:
    """The size of the group of a row of k elements that has one scale: k, padded as packed weights are."""
    return max(-(-k // GROUP_MULTIPLE), 1) * GROUP_MULTIPLE


def _empty_packed(weights: tuple[Float8Weight, ...], n: int, columns: int, *, gated: bool) -> PackedFloat8Weight:
    group, k = packed_group(weights[0]), weights[0].shape[1]
    for i, weight in enumerate(weights[1:], start=1):
        if weight.shape[1] != k or packed_group(weight, f"weight {i}") != group:
            raise KernelArgumentError(f"weight {i}", "has groups or a width that the first has not")
    lib = library()
    padded = -(-k // GROUP_MULTIPLE) * GROUP_MULTIPLE
    storage = zeros_for_reading(lib.functions.baton_float8_size(group, columns, padded), torch.uint8)
    return PackedFloat8Weight(n, k, padded, gated, storage, storage.data_ptr(), lib.isa, group)


def _place(packed: PackedFloat8Weight, weight: Float8Weight, first: int, spread: int) -> None:
    n, k = weight.shape
    codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
    library().functions.baton_pack_float8(
        packed.isa,
        packed.group,
        codes.data_ptr(),
        scales.data_ptr(),
        packed.address,
        n,
        k,
        packed.padded_k,
        first,
        spread,
    )

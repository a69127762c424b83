"""Linear layers on weights of 4, 5, 6 and 8 bits, which stay that small in memory.

A product quantises the rows of x to 8 bits, in blocks of at most 32 elements, and multiplies integers. Every
instruction set gives the same bits (csrc/quantized.h).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from baton.runner.backends.cpu.kernels.adapters import ProductAdapters
from baton.runner.backends.cpu.kernels.call_structs import Number, QuantizedFormat, QuantizedParts
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.huge_pages import zeros_for_reading
from baton.runner.backends.cpu.kernels.library import DTYPES, check_status, library
from baton.runner.backends.cpu.kernels.product import (
    empty_rows,
    gated_columns,
    place_gated,
    place_stacked,
    require_bias,
    require_input,
)
from baton.runner.backends.quantized_weight import QuantizedWeight

_NUMBERS = {
    torch.float32: Number.FLOAT32,
    torch.bfloat16: Number.BFLOAT16,
    torch.float16: Number.FLOAT16,
    torch.int8: Number.INT8,
    torch.uint8: Number.UINT8,
}
_NESTED = (torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class PackedQuantizedWeight:
    """A weight [n, k] of 4, 5, 6 or 8 bits, rearranged in groups of 64 columns (csrc/quantized.h)."""

    n: int
    """Number of columns of a product's result."""
    k: int
    """Number of columns of x."""
    gated: bool
    """Whether `pack_gated_quantized` made it."""
    format: QuantizedFormat
    row_bytes: int
    """The bytes of a row of x after it is quantised for this weight."""
    storage: torch.Tensor
    """The packed records: uint8 in one dimension."""
    address: int
    """The address of the storage."""

    def rows(self, index: torch.Tensor, dtype: torch.dtype | None, threads: int) -> torch.Tensor:
        """The rows `index` (int64 [rows]) of the stacked weights, dequantised to a dtype: [rows, k]."""
        out = empty_rows(index.shape[0], self.k, dtype)
        check_status(
            library().functions.baton_dequantize_rows(
                DTYPES[out.dtype],
                ctypes.addressof(self.format),
                self.address,
                index.data_ptr(),
                out.data_ptr(),
                index.shape[0],
                self.n,
                self.k,
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
        """Multiply as `PackedWeight.multiply` does, for x in float32 or bfloat16, whose rows are quantised."""
        require_input(x, self.k)
        bias_address = None if bias is None else require_bias(bias, self.n, x.dtype)
        m = x.shape[0]
        if out is None:
            out = x.new_empty((m, self.n))
        room = torch.empty(m * self.row_bytes, dtype=torch.uint8)
        lib = library()
        status = lib.quantized_linear(
            lib.isa,
            DTYPES[x.dtype],
            ctypes.addressof(self.format),
            x.data_ptr(),
            self.address,
            bias_address,
            out.data_ptr(),
            room.data_ptr(),
            m,
            self.n,
            self.k,
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


def format_of(weight: QuantizedWeight, name: str = "weight") -> QuantizedFormat:
    """The format in which a weight is packed. Weights of one format and one k can be stacked.

    Raises KernelArgumentError for a weight that has no packed format.
    """
    _require_parts(weight, name)
    group = weight.group
    nested = [factors.shape[1] for factors in (weight.scale_factors, weight.offset_factors) if factors is not None]
    num_groups = weight.scales.shape[1]
    return QuantizedFormat(
        bits=weight.bits,
        group=group,
        block=max(block for block in range(4, 33, 4) if group % block == 0),
        groups_per_record=num_groups // max(nested) if nested and num_groups else 1,
        zero=weight.zeros if isinstance(weight.zeros, int) else 0,
        has_zeros=not isinstance(weight.zeros, int),
        scales=_NUMBERS[weight.scales.dtype],
        offsets=Number.NONE if weight.offsets is None else _NUMBERS[weight.offsets.dtype],
    )


def pack_quantized(*weights: QuantizedWeight) -> PackedQuantizedWeight:
    """Pack weights [n_i, k] of one format, stacked over their outputs. Raises KernelArgumentError for others."""
    n = sum(weight.shape[0] for weight in weights)
    packed = _empty_packed(weights, n, n, gated=False)
    place_stacked(weights, partial(_place, packed))
    return packed


def pack_gated_quantized(gate: QuantizedWeight, up: QuantizedWeight) -> PackedQuantizedWeight:
    """Pack two weights [n, k] for a gated product; formats that differ are widened to one that has both."""
    if gate.shape != up.shape:
        raise KernelArgumentError("up", f"is {tuple(up.shape)}, the gate {tuple(gate.shape)}")
    if format_of(gate, "gate") != format_of(up, "up"):
        group = math.gcd(gate.group, up.group)
        gate, up = _widened(gate, group), _widened(up, group)
    n = gate.shape[0]
    packed = _empty_packed((gate, up), n, gated_columns(n), gated=True)
    place_gated(gate, up, partial(_place, packed))
    return packed


def _require_parts(weight: QuantizedWeight, name: str) -> None:
    """Raises KernelArgumentError, which names the first part of a weight that can't be packed."""
    if weight.bits not in (4, 5, 6, 8):
        raise KernelArgumentError(name, f"has codes of {weight.bits} bits, must be 4, 5, 6 or 8")
    _require_tensor(weight.codes, f"{name}'s codes", (torch.uint8,), None)
    n, k = weight.shape
    if weight.group < 1 or k % weight.group != 0:
        raise KernelArgumentError(name, f"has groups of {weight.group}, which do not divide its {k} columns")
    if weight.group % 4 != 0:
        raise KernelArgumentError(
            name, f"has groups of {weight.group}, which is not a multiple of 4: load the model with --dequantize"
        )
    if weight.codes.numel() > 0 and int(weight.codes.max()) >= 1 << weight.bits:
        raise KernelArgumentError(f"{name}'s codes", f"must be below {1 << weight.bits}")
    groups = (n, k // weight.group)
    _require_tensor(weight.scales, f"{name}'s scales", tuple(_NUMBERS), groups)
    _require_factors(weight.scales, weight.scale_factors, f"{name}'s scale factors")
    if isinstance(weight.zeros, int):
        if not 0 <= weight.zeros <= 255:
            raise KernelArgumentError(f"{name}'s zeros", f"must be 0 to 255, is {weight.zeros}")
    else:
        _require_tensor(weight.zeros, f"{name}'s zeros", (torch.uint8,), groups)
    if weight.offsets is not None:
        _require_tensor(weight.offsets, f"{name}'s offsets", tuple(_NUMBERS), groups)
        _require_factors(weight.offsets, weight.offset_factors, f"{name}'s offset factors")
    elif weight.offset_factors is not None:
        raise KernelArgumentError(f"{name}'s offset factors", "have no offsets")
    shapes = {factors.shape for factors in (weight.scale_factors, weight.offset_factors) if factors is not None}
    if len(shapes) > 1:
        raise KernelArgumentError(f"{name}'s offset factors", "must have the shape of the scale factors")


def _require_factors(values: torch.Tensor, factors: torch.Tensor | None, name: str) -> None:
    if (factors is not None) != (values.dtype in _NESTED):
        raise KernelArgumentError(name, "must be there for numbers of 8 bits, and for no others")
    if factors is None:
        return
    _require_tensor(factors, name, (torch.float16,), None)
    (n, groups), (rows, count) = values.shape, factors.shape
    if rows != n or (groups > 0 and (count == 0 or groups % count != 0)):
        raise KernelArgumentError(name, f"must be [{n}, a divisor of {groups}], are {tuple(factors.shape)}")


def _require_tensor(
    tensor: torch.Tensor, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, int] | None
) -> None:
    if tensor.dtype not in dtypes or tensor.ndim != 2 or not tensor.is_cpu:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise KernelArgumentError(
            name, f"must be {kinds} of two dimensions on the CPU, are {tensor.dtype} {tuple(tensor.shape)}"
        )
    if shape is not None and tensor.shape != shape:
        raise KernelArgumentError(name, f"must be {shape}, are {tuple(tensor.shape)}")


def _widened(weight: QuantizedWeight, group: int) -> QuantizedWeight:
    """The same numbers with codes of 8 bits, groups of `group` with a zero each, and float32 scales and offsets."""
    n, _ = weight.shape
    times = weight.group // group
    zeros, offsets = weight.zeros, weight.float32_offsets()
    if isinstance(zeros, int):
        zeros = torch.full((n, weight.scales.shape[1]), zeros, dtype=torch.uint8)
    if offsets is None:
        offsets = torch.zeros(n, weight.scales.shape[1], dtype=torch.float32)
    return replace(
        weight,
        bits=8,
        group=group,
        scales=weight.float32_scales().repeat_interleave(times, dim=1),
        scale_factors=None,
        zeros=zeros.repeat_interleave(times, dim=1),
        offsets=offsets.repeat_interleave(times, dim=1),
        offset_factors=None,
    )


def _empty_packed(weights: tuple[QuantizedWeight, ...], n: int, columns: int, *, gated: bool) -> PackedQuantizedWeight:
    first, k = format_of(weights[0]), weights[0].shape[1]
    for i, weight in enumerate(weights[1:], start=1):
        if weight.shape[1] != k or format_of(weight, f"weight {i}") != first:
            raise KernelArgumentError(f"weight {i}", "is of another format or width than the first")
    functions, address = library().functions, ctypes.addressof(first)
    storage = zeros_for_reading(functions.baton_quantized_size(address, columns, k), torch.uint8)
    row_bytes = functions.baton_quantized_row_bytes(address, k)
    return PackedQuantizedWeight(n, k, gated, first, row_bytes, storage, storage.data_ptr())


def _place(packed: PackedQuantizedWeight, weight: QuantizedWeight, first: int, spread: int) -> None:
    zeros = None if isinstance(weight.zeros, int) else weight.zeros
    tensors = (weight.codes, weight.scales, weight.scale_factors, weight.offsets, weight.offset_factors, zeros)
    kept = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    parts = QuantizedParts(*(None if tensor is None else tensor.data_ptr() for tensor in kept))
    library().functions.baton_pack_quantized(
        ctypes.addressof(packed.format),
        ctypes.addressof(parts),
        packed.address,
        weight.shape[0],
        packed.k,
        first,
        spread,
    )

"""Reads weights in 8-bit floating point (e4m3).

A scale multiplies the whole weight, a row, or a block of 128 x 128 elements (DeepSeek-V3's layout). Its tensor is
called `weight_scale` or `weight_scale_inv`; both are multiplied. A weight whose blocks are of a width that the kernels
don't take is dequantised when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.runner.backends.quantized_weight import GROUP_MULTIPLE, Float8Weight
from baton.runner.model.stored.weight import (
    FLOATS,
    CheckpointTensor,
    StoredWeight,
    UnusableWeight,
    expect,
    expect_finite,
    matrix_shape,
    packed_bytes,
    whole_number,
)

_SCALES = ("weight_scale", "weight_scale_inv")
_BLOCK = (128, 128)
_SCALE_BYTES = 4
_NAN = 0x7F
"""The code of NaN, without its sign; e4m3 has no infinities."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """Weights in float8 e4m3, with scales of any of the three kinds."""

    block: tuple[int, int] = _BLOCK
    """Rows and columns of a block, where a scale is for a block."""

    parts = ("weight", *_SCALES)
    main_parts = _SCALES

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Fp8:
        """Read a `quantization_config`; raises UnusableWeight."""
        return cls(block_of(config.get("weight_block_size")))

    @property
    def description(self) -> str:
        return "fp8 (e4m3)"

    def stored(self, layer: str, parts: Mapping[str, CheckpointTensor], dequantize: bool) -> StoredWeight:
        """Raises UnusableWeight for wrong shapes and scales that are not finite."""
        if "weight" not in parts:
            raise UnusableWeight(f"{layer} lacks weight")
        weight, name = parts["weight"], next(name for name in _SCALES if name in parts)
        scale = parts[name]
        n, k = matrix_shape(weight, f"{layer}.weight")
        expect(weight, f"{layer}.weight", ("F8_E4M3",))
        expect(scale, f"{layer}.{name}", FLOATS)
        blocks = (-(-n // self.block[0]), -(-k // self.block[1]))
        if scale.shape not in {(), (1,), (1, 1), (n,), (n, 1), blocks}:
            raise UnusableWeight(
                f"{layer}.{name} has the shape {list(scale.shape)}, which is neither one scale, nor one for each of "
                f"{n} rows, nor one for each block of {self.block[0]} x {self.block[1]}"
            )
        expect_finite(scale, f"{layer}.{name}")
        # A scale that the file has for all rows, or for a block of rows, is packed for each of them.
        group = self.block[1] if scale.shape == blocks and blocks[1] > 1 else k
        size = packed_bytes((n, k), 8, group, _SCALE_BYTES)
        is_packed = group == k or group % GROUP_MULTIPLE == 0
        return StoredWeight(
            (n, k), lambda: self._read(weight, scale, group, f"{layer}.weight"), size if is_packed else None
        )

    def _read(self, weight: CheckpointTensor, scale: CheckpointTensor, group: int, name: str) -> Float8Weight:
        """Raises UnusableWeight for codes that are not a number."""
        codes, scales = weight.read(), scale.read().float()
        n = codes.shape[0]
        if bool(codes.view(torch.uint8).bitwise_and(0x7F).eq(_NAN).any()):
            raise UnusableWeight(f"{name} has numbers that are not finite; copy the file again")
        if scales.numel() == 1:
            scales = scales.reshape(1, 1).expand(n, 1)
        elif scales.shape[0] == n:
            scales = scales.reshape(n, -1)
        else:
            scales = scales.repeat_interleave(self.block[0], 0)[:n]
        return Float8Weight(codes, scales.contiguous(), group)


def block_of(value: object) -> tuple[int, int]:
    """The shape of a block in a configuration; raises UnusableWeight."""
    if value is None:
        return _BLOCK
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise UnusableWeight(f"its quantization_config has a block of {value!r:.80}, which is not two sizes")
    rows, columns = (whole_number(size, "the size of a block") for size in value)
    if rows < 1 or columns < 1:
        raise UnusableWeight(f"its quantization_config has blocks of {rows} x {columns}; sizes must be positive")
    return rows, columns

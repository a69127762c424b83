"""Reads weights in 8-bit floating point (e4m3), which are dequantised when a model is loaded.

A scale multiplies the whole weight, a row, or a block of 128 x 128 elements (DeepSeek-V3's layout). Its tensor is
called `weight_scale` or `weight_scale_inv`; both are multiplied. The codes are not evenly spaced, so they are no
QuantizedWeight: a packed form would be one more kind of weight in the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.runner.model.quantization.stored_weight import (
    FLOATS,
    CheckpointTensor,
    StoredWeight,
    UnusableWeight,
    expect,
    expect_finite,
    matrix_shape,
    whole_number,
)

_SCALES = ("weight_scale", "weight_scale_inv")
_BLOCK = (128, 128)


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
        return StoredWeight((n, k), lambda: self._read(weight, scale), packed_bytes=None)

    def _read(self, weight: CheckpointTensor, scale: CheckpointTensor) -> torch.Tensor:
        wide, factors = weight.read().float(), scale.read().float()
        n, k = wide.shape
        if factors.numel() == 1:
            return wide * factors.reshape(())
        if factors.numel() == n and factors.shape[0] == n:
            return wide * factors.reshape(n, 1)
        rows, columns = self.block
        return wide * factors.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


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

"""Weights of few bits with scales, whatever file format they came in: what readers make and operations pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

GROUP_MULTIPLE = 32
"""Operations pack a weight whose groups are a multiple of this many elements of k, or whole rows."""


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A weight W [n, k] whose rows have a scale for every `group` neighbouring elements of k.

    W[i, j] = scales[i, j // group] * codes[i, j]. The last group of a row may be shorter than the others.
    """

    codes: torch.Tensor
    """float8_e4m3fn [n, k], without NaN ("8-bit Floating Point Specification" of the Open Compute Project)."""
    scales: torch.Tensor
    """float32 [n, number of groups]."""
    group: int
    """Number of elements of k that share a scale."""

    @property
    def shape(self) -> tuple[int, int]:
        """n, the number of outputs, and k, the number of inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    def in_groups(self, group: int) -> Float8Weight:
        """The same weight with smaller groups, whose size divides this one's, or any size if a row is one group."""
        of_group = torch.arange(0, self.shape[1], group) // self.group
        return Float8Weight(self.codes, self.scales[:, of_group], group)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W in `dtype` [n, k], computed in that dtype (float64 for oracles) or, if it is narrower, in float32."""
        wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        spread = self.scales.to(wide).repeat_interleave(self.group, dim=1)[:, : self.shape[1]]
        return (self.codes.to(wide) * spread).to(dtype)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight W [n, k] in groups of `group` neighbouring elements of k, G = k / group groups a row.

    W[i, j] = scale[i, g] * (codes[i, j] - zero[i, g]) + offset[i, g], with g = j // group. All of these numbers are
    exact in float32, so formats differ in how many bytes they take and not in what their products mean.
    """

    codes: torch.Tensor
    """uint8 [n, k], below 2 ** bits."""
    bits: int
    """How many bits a code takes in memory after packing: 4, 5, 6 or 8."""
    group: int
    """Number of elements of k that share a scale; it divides k."""
    scales: torch.Tensor
    """float16, bfloat16 or float32 [n, G]; or int8 or uint8 [n, G], which `scale_factors` multiply."""
    scale_factors: torch.Tensor | None = None
    """float16 [n, G / r]: one factor for every r neighbouring groups (r is 8 or 16 in GGUF's K formats); None: 1."""
    zeros: int | torch.Tensor = 0
    """The code that means zero: one number for the whole weight, or uint8 [n, G]."""
    offsets: torch.Tensor | None = None
    """float16, bfloat16 or float32 [n, G], or uint8 [n, G], which `offset_factors` multiply; None: no offsets."""
    offset_factors: torch.Tensor | None = None
    """float16 [n, G / r], with its sign; None: 1."""

    @property
    def shape(self) -> tuple[int, int]:
        """n, the number of outputs, and k, the number of inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    def float32_scales(self) -> torch.Tensor:
        """The scales of all groups: float32 [n, G]."""
        return _multiplied(self.scales, self.scale_factors)

    def float32_offsets(self) -> torch.Tensor | None:
        """The offsets of all groups: float32 [n, G]; None: no offsets."""
        return None if self.offsets is None else _multiplied(self.offsets, self.offset_factors)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W in `dtype` [n, k], computed in that dtype (float64 for oracles) or, if it is narrower, in float32."""
        n, k = self.shape
        wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        # A copy, changed in place: memory that is new for each step would take more time than the arithmetic.
        weight = self.codes.view(n, k // self.group, self.group).to(wide)
        if not isinstance(self.zeros, int):
            weight -= self.zeros.to(wide)[..., None]
        elif self.zeros:
            weight -= self.zeros
        weight *= self.float32_scales().to(wide)[..., None]
        offsets = self.float32_offsets()
        if offsets is not None:
            weight += offsets.to(wide)[..., None]
        return weight.view(n, k).to(dtype)


NarrowWeight: TypeAlias = QuantizedWeight | Float8Weight
"""A quantised weight that operations pack as small as it is."""


def _multiplied(values: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    wide = values.float()
    if factors is None:
        return wide
    return wide * factors.float().repeat_interleave(values.shape[1] // factors.shape[1], dim=1)

"""A weight in 8-bit floating point with scales, whatever file format it came in."""

from __future__ import annotations

from dataclasses import dataclass

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

"""Quantises plain weights: 8 or 4 bits with one float16 scale for 32 neighbouring elements, symmetric about zero.

8.5 bits a weight: the scale is the largest number of a group, divided by 127. 4.5 bits a weight: the number with the
largest magnitude gets the code 0 (-8 times the scale), or the scale is a little smaller, whichever of a few candidates
gives the least squared error.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.model.stored.weight import UnusableWeight

Quantization: TypeAlias = Literal["int8", "int4"]

GROUP = 32
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Candidates for the scale of 4 bits, as shares of the one that keeps the largest number."""
_PIECE = 1 << 18
"""How many elements are quantised at once, so that intermediate results stay in the processor's cache."""


def bits_of(quantization: Quantization) -> int:
    """The bits of a code."""
    return 8 if quantization == "int8" else 4


def quantized(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Quantise a weight [n, k], k a multiple of GROUP, to codes of 8 or 4 bits.

    Raises UnusableWeight for numbers that are not finite, or too large for a scale in float16.
    """
    n, k = weight.shape
    codes = torch.empty(n, k, dtype=torch.uint8)
    scales = torch.empty(n, k // GROUP, dtype=torch.float16)
    piece = max(1, _PIECE // k)
    for first in range(0, n, piece):
        rows = weight[first : first + piece].detach().float().view(-1, GROUP)
        quantised = _eight_bits(rows) if bits == 8 else _four_bits(rows)
        codes[first : first + piece] = quantised[0].view(-1, k)
        scales[first : first + piece] = quantised[1].view(-1, k // GROUP)
    if not bool(scales.isfinite().all()):
        raise UnusableWeight("has numbers that are not finite, or too large to be quantised")
    return QuantizedWeight(codes=codes, bits=bits, group=GROUP, scales=scales, zeros=1 << (bits - 1))


def _eight_bits(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [m, GROUP] and scales float16 [m, 1] of groups float32 [m, GROUP]."""
    scales = (groups.abs().amax(dim=1, keepdim=True) / 127).half()
    return _codes(groups, scales, -127, 127), scales


def _four_bits(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [m, GROUP] and scales float16 [m, 1] of groups float32 [m, GROUP]."""
    largest = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True))
    best = torch.empty_like(groups, dtype=torch.uint8)
    best_scales = (largest / -8).half()
    least = torch.full_like(largest, torch.inf)
    for share in _SHRINK:
        scales = (largest * (share / -8)).half()
        codes = _codes(groups, scales, -8, 7)
        error = ((codes.float() - 8) * scales.float() - groups).square_().sum(dim=1, keepdim=True)
        better = error < least
        best = torch.where(better, codes, best)
        best_scales = torch.where(better, scales, best_scales)
        least = torch.where(better, error, least)
    return best, best_scales


def _codes(groups: torch.Tensor, scales: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """The nearest codes to groups / scales, with zero at `-low` for 4 bits and at 128 for 8."""
    wide = scales.float()
    # A scale of zero: all numbers of the group are zero, or vanish in float16.
    inverse = torch.where(wide == 0, 0.0, 1.0 / wide)
    zero = 128 if high == 127 else 8
    return (groups * inverse).round_().clamp_(low, high).add_(zero).to(torch.uint8)

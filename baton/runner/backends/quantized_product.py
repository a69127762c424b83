"""Products of quantised weights written plainly in torch, with the arithmetic of the C kernels (csrc/quantized.h)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.errors import ConfigError
from baton.runner.backends.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of x in 8 bits."""

    codes: torch.Tensor
    """float32 [m, k / block, block]: integers from -127 to 127."""
    scales: torch.Tensor
    """float32 [m, k / block]."""


def block_of(group: int) -> int:
    """The number of neighbouring elements of x that share a scale, for a weight with such groups: at most 32.

    Raises ConfigError for a group that is not a multiple of 4.
    """
    fitting = [block for block in range(4, 33, 4) if group > 0 and group % block == 0]
    if not fitting:
        raise ConfigError(
            f"a quantised weight has groups of {group}, not a multiple of 4: load the model with --dequantize"
        )
    return fitting[-1]


def quantize_rows(x: torch.Tensor, block: int) -> QuantizedRows:
    """Quantise x [m, k]: scale = max|x| / 127 of a block, codes = x / scale, rounded half to even."""
    blocks = x.float().view(x.shape[0], -1, block)
    largest = blocks.abs().amax(dim=-1)
    scales = torch.where(largest.isfinite(), largest / 127.0, torch.nan)
    codes = torch.round(blocks / scales[..., None])
    return QuantizedRows(torch.where(scales[..., None] > 0, codes, 0.0), scales)


def quantized_product(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """The float32 sums of x [m, k] times the weight [n, k] transposed: [m, n].

    In the order of k, each block adds scale of w * scale of x * the product of integers, and then its offset's share. A
    fused multiply-add is computed in float64 and rounded, so it may differ from the instruction's in a rare last bit.
    """
    n, _ = weight.shape
    block = block_of(weight.group)
    rows = quantize_rows(x, block)
    scales, offsets = weight.float32_scales(), weight.float32_offsets()
    sums = torch.zeros(x.shape[0], n)
    for index in range(rows.codes.shape[1]):
        group = index * block // weight.group
        zeros = weight.zeros if isinstance(weight.zeros, int) else weight.zeros[:, group, None].float()
        codes, scale = rows.codes[:, index], rows.scales[:, index, None]
        # Exact: these integers and their sums are below 2 ** 24, so the order of summation does not matter.
        products = codes @ (weight.codes[:, index * block : (index + 1) * block].float() - zeros).T
        sums = _fused(scale * scales[None, :, group], products, sums)
        if offsets is not None:
            sums = _fused(offsets[None, :, group], scale * codes.sum(dim=1, keepdim=True), sums)
    return sums


def _fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).float()

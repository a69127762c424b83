"""Products of quantised weights written plainly in torch.

Those of integers have the arithmetic of the C kernels (csrc/quantized.h). Those of float8 have the same scales at the
same places (csrc/float8.h), but their sums within a group are torch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.errors import ConfigError
from baton.runner.backends.quantized_weight import GROUP_MULTIPLE, Float8Weight, NarrowWeight, QuantizedWeight
from baton.runner.backends.weight_rows import rows_of

_WIDENED_ROWS = 4096
"""How many rows of a weight are widened to float32 at a time, so that a head of many rows needs little memory."""
_QUICK_ROWS = 512
"""The same where sums may have any order: so few that they stay in the processor's cache until they are multiplied."""


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
    blocks = x.float().view(x.shape[0], x.shape[1] // block, block)
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
    sums = torch.zeros(x.shape[0], n, dtype=torch.float32)
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


def require_float8_groups(weight: Float8Weight) -> None:
    """Raise ConfigError for groups that the C kernels don't take, so that all operations take the same models."""
    if weight.group < weight.shape[1] and weight.group % GROUP_MULTIPLE != 0:
        raise ConfigError(
            f"a weight in float8 has groups of {weight.group}, neither a multiple of {GROUP_MULTIPLE} nor whole rows: "
            "load the model with --dequantize"
        )


def float8_product(x: torch.Tensor, weight: Float8Weight) -> torch.Tensor:
    """The float32 sums of x [m, k] times the weight [n, k] transposed: [m, n].

    In the order of k, each group of elements adds its scale times the sum of its products.
    """
    n, k = weight.shape
    sums = torch.zeros(x.shape[0], n, dtype=torch.float32)
    for index, first in enumerate(range(0, k, weight.group)):
        rows = x[:, first : first + weight.group].float()
        codes = weight.codes[:, first : first + weight.group]
        parts = [functional.linear(rows, part.float()) for part in torch.split(codes, _WIDENED_ROWS)]
        sums = _fused(weight.scales[None, :, index], torch.cat(parts, dim=1), sums)
    return sums


def narrow_product(x: torch.Tensor, weight: NarrowWeight) -> torch.Tensor:
    """The float32 sums of x [m, k] times a quantised weight [n, k] transposed: [m, n]."""
    return float8_product(x, weight) if isinstance(weight, Float8Weight) else quantized_product(x, weight)


def product_of_plain_numbers(x: torch.Tensor, weight: NarrowWeight) -> torch.Tensor:
    """`narrow_product`, summed in another order, which takes a fraction of the time: [m, k] to float32 [m, n].

    x is rounded to 8 bits as there, and then all is made plain.
    """
    if isinstance(weight, QuantizedWeight):
        rows = quantize_rows(x, block_of(weight.group))
        x = (rows.codes * rows.scales[..., None]).view(x.shape)
    n, sums = weight.shape[0], []
    for first in range(0, n, _QUICK_ROWS):
        part = rows_of(weight, first, min(n, first + _QUICK_ROWS))
        assert isinstance(part, NarrowWeight)
        sums.append(functional.linear(x.float(), part.dequantized(torch.float32)))
    return torch.cat(sums, dim=1)


def _fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).float()

"""One layer of the paged cache: where its keys and values are, and how torch reads and writes them.

In 8 bits there is a code for each number, and a scale for each key and each value of a head; a number is scale * code.
The code is an int8 or a float8 (e4m3fn of the OCP's "8-bit Floating Point Specification"), the scale a bfloat16. A
scale depends on its own key or value alone, never on other tokens of its block: otherwise the bits in the cache would
depend on the chunk in which a token was computed. csrc/cache_8bit.c writes the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The dtypes of a cache in 8 bits, and their largest code."""
_SMALLEST_SCALE = 2.0**-120
"""Below this, a scale is zero, since numbers could not be divided by it."""


@dataclass(frozen=True, slots=True)
class CacheView:
    """One layer's part of every block. Offsets and strides count elements of the memory.

    In a block the layer's keys are [num_kv_heads, block_size, key_dim] at `key_offset`, and its values are
    [num_kv_heads, block_size, value_dim] at `value_offset`. Other layers may have other shapes.
    """

    memory: torch.Tensor
    """The whole cache, one dimension: float32 or bfloat16, the dtype of the rows; or int8 or float8_e4m3fn."""
    num_blocks: int
    block_stride: int
    key_offset: int
    value_offset: int
    num_kv_heads: int
    block_size: int
    key_dim: int
    value_dim: int
    scale_offset: int | None = None
    """In 8 bits: where a block has a scale for each key: bfloat16 [num_kv_heads, block_size]. None: keys and values are
    stored as they are."""
    heads_of_block: int | None = None
    """How many key/value heads the layer has in a block; None: num_kv_heads, all of which this view has."""
    values_in_keys: bool = False
    """Whether a value is the first `value_dim` numbers of its key; then `value_offset` is that of the keys, and keys
    alone are stored."""

    @property
    def scales_apart(self) -> int:
        """In 8 bits: how many scales the scale of a value is behind that of its key."""
        if self.values_in_keys:
            return 0
        return (self.heads_of_block or self.num_kv_heads) * self.block_size


def narrow(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., D] in `dtype` and scales [...] in bfloat16 of numbers [..., D].

    Where a number is NaN or infinite, the scale is NaN, and so is all that is read.
    """
    wide, largest_code = numbers.float(), LARGEST_CODE[dtype]
    scales = (wide.abs().amax(-1) / largest_code).to(torch.bfloat16)
    scales = scales.masked_fill(scales.float() < _SMALLEST_SCALE, 0)
    finite = wide.isfinite().all(-1)
    quotients = (wide / scales.float()[..., None]).clamp(-largest_code, largest_code)
    # Filled, since a choice by a mask would have to be counted on a GPU.
    quotients = quotients.masked_fill(((scales == 0) | ~finite)[..., None], 0)
    scales = scales.masked_fill(~finite, float("nan"))
    return (quotients.round() if dtype == torch.int8 else quotients).to(dtype), scales


def widen(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [..., D] in `dtype`, from codes [..., D] and scales [...]."""
    return (codes.float() * scales.float()[..., None]).to(dtype)


def keys_and_values(cache: CacheView) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's keys [blocks, KH, block_size, KD] and values [blocks, KH, block_size, VD]; or their codes."""
    views = []
    for width, offset in ((cache.key_dim, cache.key_offset), (cache.value_dim, cache.value_offset)):
        size = (cache.num_blocks, cache.num_kv_heads, cache.block_size, width)
        apart = cache.key_dim if cache.values_in_keys else width
        stride = (cache.block_stride, cache.block_size * apart, apart, 1)
        views.append(cache.memory.as_strided(size, stride, cache.memory.storage_offset() + offset))
    return views[0], views[1]


def scales(cache: CacheView) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the scales of a layer's keys and of its values in 8 bits: bfloat16 [blocks, KH, block_size] each."""
    if cache.scale_offset is None:
        raise ValueError("the cache is not in 8 bits")
    memory = cache.memory.view(torch.bfloat16)
    size = (cache.num_blocks, cache.num_kv_heads, cache.block_size)
    stride = (cache.block_stride // 2, cache.block_size, 1)
    first = memory.storage_offset() + cache.scale_offset // 2
    return memory.as_strided(size, stride, first), memory.as_strided(size, stride, first + cache.scales_apart)


def write_rows(
    cache: CacheView, key: torch.Tensor, value: torch.Tensor | None, blocks: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Write keys [T, KH, KD] and values [T, KH, VD], or None if they are in keys, to `offsets` [T] in `blocks` [T]."""
    views = keys_and_values(cache)
    if cache.scale_offset is None:
        for view, rows in zip(views, (key, value), strict=True):
            if rows is not None:
                view[blocks, :, offsets] = rows
        return
    for view, scale_view, rows in zip(views, scales(cache), (key, value), strict=True):
        if rows is None:
            continue
        codes, row_scales = narrow(rows, cache.memory.dtype)
        # torch cannot assign float8 by index.
        view.view(torch.int8)[blocks, :, offsets] = codes.view(torch.int8)
        scale_view[blocks, :, offsets] = row_scales


def read_blocks(cache: CacheView, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys [KH, tokens, KD] and values [KH, tokens, VD] of these blocks in `dtype`, in the order of the blocks."""
    views = keys_and_values(cache)
    if cache.scale_offset is None:
        keys, values = (view[blocks] for view in views)
    else:
        keys, values = (
            widen(view.view(torch.int8)[blocks].view(cache.memory.dtype), scale_view[blocks], dtype)
            for view, scale_view in zip(views, scales(cache), strict=True)
        )
    return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)

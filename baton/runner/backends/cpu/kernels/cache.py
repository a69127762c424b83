"""The place of one layer's keys and values in the block-major cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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

    @property
    def scales_apart(self) -> int:
        """In 8 bits: how many scales the scale of a value is behind that of its key."""
        return (self.heads_of_block or self.num_kv_heads) * self.block_size

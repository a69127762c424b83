"""The parts of blocks: where the bytes of some of a block's tokens lie in it.

A block is divided into sub-blocks of equal numbers of neighbouring tokens. The sub-blocks of all blocks are numbered:
`block * parts + index`. Their bytes have an order of their own, which is that of a whole block of so few tokens: two
nodes that divide blocks of different sizes into sub-blocks of the same size have the same bytes in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.engine.runner import ELEMENT_BYTES, SCALE_BYTES, KVLayout

Int64Array = npt.NDArray[np.int64]


class Division(NamedTuple):
    """Blocks of one group of layers, each divided into sub-blocks."""

    parts: int = 1
    """Sub-blocks of a block."""
    group: int = 0
    """Index of the group, whose layers the blocks hold. Of no meaning for whole blocks."""


WHOLE = Division()


@dataclass(frozen=True, slots=True)
class SubBlockRows:
    """Where a sub-block's bytes lie in its block, in their own order: one row for each head of each tensor.

    Row i of the block's sub-block n has `lengths[i]` bytes, from `starts[i] + n * lengths[i]` on.
    """

    starts: Int64Array
    lengths: Int64Array

    @property
    def num_bytes(self) -> int:
        """Size of a sub-block."""
        return int(self.lengths.sum())

    def gather(self, block: memoryview | bytes, index: int) -> bytes:
        """The bytes of the block's sub-block `index`, in their own order."""
        rows = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        return b"".join(block[start + index * length : start + (index + 1) * length] for start, length in rows)

    def offsets(self, sub_blocks: Int64Array, parts: int, block_bytes: int) -> Int64Array:
        """The offsets in memory of all rows of these sub-blocks: [sub-blocks, rows]."""
        blocks, index = sub_blocks[:, np.newaxis] // parts, sub_blocks[:, np.newaxis] % parts
        return blocks * block_bytes + self.starts + index * self.lengths


@lru_cache(maxsize=64)
def sub_block_rows(layout: KVLayout, division: Division) -> SubBlockRows:
    """The rows of a sub-block of this layout. Raises ValueError if the tokens of a block can't be divided so.

    Bytes that a group with few layers leaves unused at the end of its blocks are a row, too: each byte of a block
    belongs to one sub-block.
    """
    tokens, rest = divmod(layout.block_size, division.parts)
    if rest:
        raise ValueError(f"a block of {layout.block_size} tokens has no {division.parts} equal parts")
    element, bytes_per_token = ELEMENT_BYTES[layout.dtype], list[int]()
    for layer in layout.groups[division.group].layers:
        geometry = layout.layers[layer]
        for width in (geometry.key_dim, geometry.value_dim):
            bytes_per_token += [width * element] * geometry.num_kv_heads
        if layout.has_scales:
            bytes_per_token += [SCALE_BYTES] * (2 * geometry.num_kv_heads)
    unused = layout.block_bytes // layout.block_size - sum(bytes_per_token)
    of_token = np.array([size for size in (*bytes_per_token, unused) if size], np.int64)
    starts = np.concatenate(([0], np.cumsum(of_token * layout.block_size)[:-1]))
    return SubBlockRows(starts, of_token * tokens)

"""Digests of KV blocks and of sub-blocks: the sum over their layers of 64-bit XXH3 of a layer's bytes.

Each layer counts `2 * index + 1` times, modulo 2**64, by its index in the whole model: layers that were exchanged give
another sum. So digests of layers that lie in several memories add up to the digest of all of them. The digest of a
sub-block is that of a whole block with these bytes, on a node whose blocks have so few tokens. Bytes that a group with
few layers leaves unused are in no digest.

Digests detect accidents (a torn read, an overwritten block, a fault of memory or transport), not attacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import xxhash

from baton.engine.runner import KVMemory
from baton.runner.blocks.sub_blocks import WHOLE, Division, SubBlockRows, sub_block_rows

DIGEST_MODULUS = 1 << 64


class BlockDigests(Protocol):
    """Computes digests. May be called from any thread."""

    def __call__(self, ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        """The digests of these sub-blocks, or whole blocks, each 0 to 2**64 - 1; 0 where none of the layers is here.

        A block of a memory whose layout is not known is digested as one layer with index 0. Raises ValueError for
        sub-blocks of such a memory, and for blocks that can't be divided so.
        """
        ...


def digest_of(block: memoryview | bytes, rows: SubBlockRows, index: int = 0) -> int:
    """The digest of a block's sub-block `index`, which has these rows, by the xxhash package."""
    gathered = zip(rows.layers, rows.gather(block, index), strict=True)
    return sum(layer_weight(layer) * xxhash.xxh3_64_intdigest(content) for layer, content in gathered) % DIGEST_MODULUS


def digested_rows(memory: KVMemory, division: Division) -> SubBlockRows:
    """The rows whose layers have digests, for a division of a memory's blocks. Raises ValueError as a digest does."""
    if memory.layout is None:
        if division.parts > 1:
            raise ValueError("the layout of this memory is not known, so its blocks have no parts")
        return SubBlockRows.of_bytes(memory.block_bytes)
    rows = sub_block_rows(memory.layout, division, memory.layers)
    return rows.of_whole_layers() if division.parts == 1 else rows


def layer_weight(layer: int) -> int:
    """How often the hash of a layer counts in a digest."""
    return 2 * layer + 1

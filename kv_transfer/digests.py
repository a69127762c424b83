"""Digests of blocks, by which a receiver knows that what it read is what its sender had computed.

XXH3 with 64 bits (https://github.com/Cyan4973/xxHash): it finds accidents (a torn read, a block that was overwritten, a
fault of memory or transport), not attacks; whoever could forge KV is authenticated by other means.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import xxhash

from baton.engine.block_hash import group_key
from baton.engine.block_pool import NULL_BLOCK
from baton.engine.request import Request
from baton.engine.runner.base import KVLayout, KVMemory

BlockDigest = Callable[[int], int]
"""The digest of a block's bytes, 0 to 2**64 - 1; from any thread."""


def block_digest(memory: KVMemory) -> BlockDigest | None:
    """Digests of a runner's blocks; None for memory that the processor can't read."""
    if memory.kind != "DRAM":
        return None

    def digest(block_id: int) -> int:
        # The closure keeps `memory`, and that its owner, alive.
        start = memory.base_address + block_id * memory.block_bytes
        return xxhash.xxh3_64_intdigest((ctypes.c_char * memory.block_bytes).from_address(start))

    return digest


def wrong_block(digest: BlockDigest, block_ids: Sequence[int], digests: Sequence[int]) -> int | None:
    """The first of these blocks that does not have its digest; None when all have."""
    for block_id, expected in zip(block_ids, digests, strict=True):
        if digest(block_id) != expected:
            return block_id
    return None


class OfferedDigests:
    """The digests of what a sender offers: each is computed once, when its block was filled.

    A block of a cached prefix keeps the digest that it had when it was computed: one that was damaged since is found.
    """

    def __init__(self, digest: BlockDigest, layout: KVLayout) -> None:
        self._digest = digest
        self._layout = layout
        self._known: dict[int, tuple[bytes, int]] = {}
        """By block: the key of what it held, and the digest of that."""

    def of(self, request: Request, first: int, block_ids: Sequence[int]) -> tuple[int, ...]:
        """One for each of a prompt's blocks from entry `first` of its table on; 0 for the null block."""
        return tuple(
            self._one(request, entry, block_id) if block_id != NULL_BLOCK else 0
            for entry, block_id in enumerate(block_ids, first)
        )

    def _one(self, request: Request, entry: int, block_id: int) -> int:
        stripe, group = divmod(entry, len(self._layout.groups))
        if stripe >= len(request.block_hashes):
            return self._digest(block_id)  # not full, or nothing is cached here
        key = group_key(request.block_hashes[stripe], group)
        was_cached = stripe < request.num_cached_tokens // self._layout.block_size
        known_key, digest = self._known.get(block_id, (b"", 0))
        if not was_cached or known_key != key:
            digest = self._digest(block_id)
            self._known[block_id] = (key, digest)
        return digest

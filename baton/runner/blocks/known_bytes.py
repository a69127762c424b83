"""Fills blocks with known bytes, by which two nodes find out whether one can read the other's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from hashlib import blake2b

import numpy as np
import xxhash

from baton.engine.runner import KVMemory
from baton.runner.blocks.sub_blocks import Division, sub_block_rows

FillBlock = Callable[[int, str], Mapping[int, int]]
"""Fills a block with the bytes that belong to a seed. Returns digests as `block_digests` would find them, by the number
of equal parts into which the block's tokens can be divided: of the last part, and so by 1 of the whole block. The parts
are those of a block of the first group of layers."""


def block_filler(memory: KVMemory) -> FillBlock:
    """The function that fills blocks of this memory. It may be called from any thread, and returns when the bytes are
    there. Nothing may read or write the block meanwhile.

    Its digests are those of the bytes that it made, and not of what the memory holds: a block that was not written, or
    not where readers look for it, has another one.
    """
    if memory.kind == "DRAM":
        write = _write_to_host(memory)
    else:
        from baton.runner.blocks.device_blocks import write_from_host

        write = write_from_host(memory)

    def fill(block: int, seed: str) -> Mapping[int, int]:
        content = known_bytes(seed, memory.block_bytes)
        write(block, content)
        digests, layout = {1: xxhash.xxh3_64_intdigest(content)}, memory.layout
        tokens = layout.block_size if layout is not None else 1
        for parts in (parts for parts in range(2, tokens + 1) if layout is not None and tokens % parts == 0):
            last = sub_block_rows(layout, Division(parts)).gather(content, parts - 1)
            digests[parts] = xxhash.xxh3_64_intdigest(last)
        return digests

    return fill


def known_bytes(seed: str, num_bytes: int) -> bytes:
    """The bytes that belong to a seed; those of different seeds have nothing in common."""
    key = int.from_bytes(blake2b(seed.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.SFC64(key)).bytes(num_bytes)


def _write_to_host(memory: KVMemory) -> Callable[[int, bytes], None]:
    def write(block: int, content: bytes) -> None:
        # The closure keeps `memory` and with it the memory's owner alive.
        ctypes.memmove(memory.base_address + block * memory.block_bytes, content, memory.block_bytes)

    return write

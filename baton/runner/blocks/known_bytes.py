"""Fills blocks with known bytes, by which two nodes find out whether one can read the other's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Protocol

import numpy as np

from baton.engine.runner import KVMemory
from baton.runner.blocks.digest_definition import digest_of, digested_rows
from baton.runner.blocks.sub_blocks import Division


class FillBlock(Protocol):
    """Fills blocks of one memory with known bytes."""

    def __call__(self, block: int, seed: str, group: int = 0, /) -> Mapping[int, int]:
        """Fill a block with the bytes that belong to a seed, whatever the group.

        Returns digests as `block_digests` would find them, by the number of equal parts into which the block's tokens
        can be divided: of the last part, and so by 1 of the whole block. The parts are those of a block of this group
        of layers, of the layers that the memory holds.
        """
        ...


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

    # Parts that were exchanged must be noticed, so each has bytes of its own.
    suffix = "" if memory.layers is None else f"/{memory.layers.start}"
    # A block with a state is not divided.
    tokens = 1 if memory.layout is None or memory.layout.keeps_states else memory.layout.block_size
    all_parts = [parts for parts in range(1, tokens + 1) if tokens % parts == 0]

    def fill(block: int, seed: str, group: int = 0, /) -> Mapping[int, int]:
        content = known_bytes(seed + suffix, memory.block_bytes)
        write(block, content)
        return {
            parts: digest_of(content, digested_rows(memory, Division(parts, group)), parts - 1) for parts in all_parts
        }

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

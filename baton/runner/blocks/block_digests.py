"""Digests of KV blocks and of sub-blocks: 64-bit XXH3 over their bytes.

The digest of a sub-block is that of a whole block with these bytes, on a node whose blocks have so few tokens. Digests
detect accidents (a torn read, an overwritten block, a fault of memory or transport), not attacks.
"""

from __future__ import annotations

import ctypes
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from baton.engine.runner import KVLayout, KVMemory
from baton.runner.backends.cpu.kernel_file import KernelsUnavailable, open_kernels
from baton.runner.blocks.sub_blocks import WHOLE, Division, sub_block_rows


class BlockDigests(Protocol):
    """Computes digests. May be called from any thread."""

    def __call__(self, ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        """The digests of these sub-blocks, or whole blocks, each 0 to 2**64 - 1.

        Raises ValueError for sub-blocks of a memory whose layout is not known, and for blocks that can't be divided so.
        """
        ...


_log = logging.getLogger(__name__)

_COPIED_AT_ONCE = 16
_SHORT = 240
"""Up to this size XXH3 uses other algorithms, which the kernels do not implement."""


def block_digests(memory: KVMemory) -> BlockDigests:
    """The digest function for a runner's blocks. Blocks on a device are copied to the host, a few at a time."""
    if memory.kind != "DRAM":
        from baton.runner.blocks.device_blocks import copied_to_host

        return _of_copies(copied_to_host(memory))
    if memory.block_bytes > _SHORT:
        try:
            return _by_kernels(memory)
        except KernelsUnavailable as reason:
            # The node has said already that it has no kernels, and what to do.
            _log.debug("digests of KV blocks keep the interpreter to themselves (the xxhash package): %s", reason)
    return _by_library(memory)


def _by_kernels(memory: KVMemory) -> BlockDigests:
    """Digests by the C kernels, which release the interpreter lock: no other thread has to wait meanwhile."""
    of_blocks, of_parts, by_library = _kernel("blocks"), _kernel("parts"), _by_library(memory)
    size = ctypes.c_size_t

    # The closure keeps `memory` and with it the memory's owner alive.
    def digests(ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        asked, found = np.array(ids, np.uint64), np.empty(len(ids), np.uint64)
        base, block_bytes, count = ctypes.c_void_p(memory.base_address), size(memory.block_bytes), size(len(ids))
        if division.parts == 1:
            of_blocks(base, block_bytes, _address(asked), count, _address(found))
        else:
            rows = sub_block_rows(_layout(memory), division)
            if rows.num_bytes <= _SHORT:
                return by_library(ids, division)
            scratch = np.empty(rows.num_bytes, np.uint8)
            arrays = (rows.starts, rows.lengths)
            where = (*map(_address, arrays), size(len(rows.starts)), _address(scratch), _address(found))
            of_parts(base, block_bytes, _address(asked), count, size(division.parts), *where)
        result: list[int] = found.tolist()
        return result

    return digests


def _kernel(name: str) -> Any:
    kernel = getattr(open_kernels(), f"baton_digest_{name}", None)
    if kernel is None:
        raise KernelsUnavailable("the kernel library was built from an older source: run `pip install -e .` again")
    kernel.restype = None
    return kernel


def _address(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _layout(memory: KVMemory) -> KVLayout:
    if memory.layout is None:
        raise ValueError("the layout of this memory is not known, so its blocks have no parts")
    return memory.layout


def _by_library(memory: KVMemory) -> BlockDigests:
    """Digests by the xxhash package, which holds the interpreter lock while it computes."""

    def digests(ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        block_bytes, parts = memory.block_bytes, division.parts
        blocks = [
            (ctypes.c_char * block_bytes).from_address(memory.base_address + i // parts * block_bytes) for i in ids
        ]
        if parts == 1:
            return [xxhash.xxh3_64_intdigest(block) for block in blocks]
        rows = sub_block_rows(_layout(memory), division)
        return [
            xxhash.xxh3_64_intdigest(rows.gather(memoryview(block).cast("B"), i % parts))
            for i, block in zip(ids, blocks, strict=True)
        ]

    return digests


def _of_copies(copied_to_host: Callable[[Sequence[int]], KVMemory]) -> BlockDigests:
    def digests(ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        found: dict[int, int] = {}
        parts_of = defaultdict[int, list[int]](list)
        for each in ids:
            parts_of[each // division.parts].append(each)
        blocks = list(parts_of)
        for first in range(0, len(blocks), _COPIED_AT_ONCE):
            some = blocks[first : first + _COPIED_AT_ONCE]
            copied = block_digests(copied_to_host(some))
            asked = [(each, at) for at, block in enumerate(some) for each in parts_of[block]]
            places = [at * division.parts + each % division.parts for each, at in asked]
            found.update(zip((each for each, _ in asked), copied(places, division), strict=True))
        return [found[each] for each in ids]

    return digests

"""Digests of KV blocks: 64-bit XXH3 over their bytes.

Digests detect accidents (a torn read, an overwritten block, a fault of memory or transport), not attacks.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from baton.engine.runner import KVMemory
from baton.runner.backends.cpu.kernel_file import KernelsUnavailable, open_kernels

BlockDigests = Callable[[Sequence[int]], Sequence[int]]
"""Computes the digests of blocks by their ids, each 0 to 2**64 - 1. May be called from any thread."""

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
    kernels = open_kernels()
    if not hasattr(kernels, "baton_digest_blocks"):
        raise KernelsUnavailable("the kernel library was built from an older source: run `pip install -e .` again")
    compute = kernels.baton_digest_blocks
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    compute.argtypes, compute.restype = [pointer, size, pointer, size, pointer], None

    def digests(block_ids: Sequence[int]) -> Sequence[int]:
        blocks, found = np.array(block_ids, np.uint64), np.empty(len(block_ids), np.uint64)
        # The closure keeps `memory` and with it the memory's owner alive.
        compute(memory.base_address, memory.block_bytes, blocks.ctypes.data, len(block_ids), found.ctypes.data)
        result: list[int] = found.tolist()
        return result

    return digests


def _by_library(memory: KVMemory) -> BlockDigests:
    """Digests by the xxhash package, which holds the interpreter lock while it computes."""

    def digests(block_ids: Sequence[int]) -> Sequence[int]:
        starts = (memory.base_address + block_id * memory.block_bytes for block_id in block_ids)
        return [xxhash.xxh3_64_intdigest((ctypes.c_char * memory.block_bytes).from_address(at)) for at in starts]

    return digests


def _of_copies(copied_to_host: Callable[[Sequence[int]], KVMemory]) -> BlockDigests:
    def digests(block_ids: Sequence[int]) -> Sequence[int]:
        found: list[int] = []
        for first in range(0, len(block_ids), _COPIED_AT_ONCE):
            some = block_ids[first : first + _COPIED_AT_ONCE]
            found += block_digests(copied_to_host(some))(range(len(some)))
        return found

    return digests

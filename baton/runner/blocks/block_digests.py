"""Digests of KV blocks: XXH3 with 64 bits of their bytes.

They find accidents (a torn read, a block that was overwritten, a fault of memory or transport), not attacks.
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
"""The digests of these blocks' bytes as they are now, each 0 to 2**64 - 1; from any thread."""

_log = logging.getLogger(__name__)

_COPIED_AT_ONCE = 16
_SHORT = 240
"""XXH3 has other rules for so few bytes, which the kernels leave to the library."""


def block_digests(memory: KVMemory) -> BlockDigests:
    """Digests of a runner's blocks. Those of a device's are copied to the host first: ask for few at a time."""
    if memory.kind != "DRAM":
        from baton.runner.blocks.device_blocks import copied_to_host

        return _of_copies(copied_to_host(memory))
    if memory.block_bytes > _SHORT:
        try:
            return _by_kernels(memory)
        except KernelsUnavailable as reason:
            _log.warning("digests of KV blocks keep the interpreter to themselves (the xxhash package): %s", reason)
    return _by_library(memory)


def _by_kernels(memory: KVMemory) -> BlockDigests:
    """Without the interpreter: the thread that has to answer at once does not wait for it."""
    kernels = open_kernels()
    if not hasattr(kernels, "baton_digest_blocks"):
        raise KernelsUnavailable("the kernel library was built from an older source: run `pip install -e .` again")
    compute = kernels.baton_digest_blocks
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    compute.argtypes, compute.restype = [pointer, size, pointer, size, pointer], None

    def digests(block_ids: Sequence[int]) -> Sequence[int]:
        blocks, found = np.array(block_ids, np.uint64), np.empty(len(block_ids), np.uint64)
        # The closure keeps `memory`, and that its owner, alive.
        compute(memory.base_address, memory.block_bytes, blocks.ctypes.data, len(block_ids), found.ctypes.data)
        result: list[int] = found.tolist()
        return result

    return digests


def _by_library(memory: KVMemory) -> BlockDigests:
    """By xxhash, which keeps the interpreter to itself while it computes."""

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

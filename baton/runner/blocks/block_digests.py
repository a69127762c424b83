"""Computes digests of KV blocks: by the C kernels, by the xxhash package, or on the GPU that has the blocks."""

from __future__ import annotations

import ctypes
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.engine.runner import KVMemory
from baton.runner.backends.cpu.kernel_file import KernelsUnavailable, open_kernels
from baton.runner.blocks.digest_definition import BlockDigests, digest_of, digested_rows, layer_weight
from baton.runner.blocks.sub_blocks import WHOLE, Division, SubBlockRows

_log = logging.getLogger(__name__)

_COPIED_AT_ONCE = 16
_SHORT = 240
"""Up to this size XXH3 uses other algorithms, which the kernels do not implement."""


def block_digests(memory: KVMemory) -> BlockDigests:
    """The digest function for a runner's blocks. Those of blocks on a GPU are computed there; where it can't do so, the
    blocks are copied to the host, a few at a time."""
    if memory.kind != "DRAM":
        from baton.runner.blocks.device_blocks import copied_to_host
        from baton.runner.blocks.device_digests import device_digests

        return device_digests(memory, _of_copies(copied_to_host(memory)))
    try:
        return _by_kernels(memory)
    except KernelsUnavailable as reason:
        # The node has said already that it has no kernels, and what to do.
        _log.debug("digests of KV blocks keep the interpreter to themselves (the xxhash package): %s", reason)
    return _by_library(memory)


def _by_kernels(memory: KVMemory) -> BlockDigests:
    """Digests by the C kernels, which release the interpreter lock: no other thread has to wait meanwhile."""
    kernel, by_library = _kernel(), _by_library(memory)
    base, block_bytes = ctypes.c_void_p(memory.base_address), ctypes.c_size_t(memory.block_bytes)

    @lru_cache(maxsize=64)
    def layers_of(division: Division) -> _DigestedLayers:
        return _DigestedLayers.of(digested_rows(memory, division), division.parts)

    # The closure keeps `memory` and with it the memory's owner alive.
    def digests(ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        layers = layers_of(division)
        if layers.are_short:
            return by_library(ids, division)
        asked, computed = np.array(ids, np.uint64), np.empty(len(ids), np.uint64)
        # Taking an array's address takes as long as digesting 20 KiB.
        scratch = np.empty(layers.num_scratch_bytes, np.uint8) if layers.num_scratch_bytes else None
        blocks = (base, block_bytes, layers.parts, _address(asked), ctypes.c_size_t(len(ids)))
        kernel(*blocks, *layers.arguments, _address(scratch) if scratch is not None else None, _address(computed))
        result: list[int] = computed.tolist()
        return result

    return digests


@dataclass(frozen=True, slots=True)
class _DigestedLayers:
    """What the kernel needs to know of the layers of a sub-block."""

    arrays: Sequence[npt.NDArray[Any]]
    arguments: Sequence[Any]
    """The addresses of these arrays, and the number of layers."""
    parts: ctypes.c_size_t
    num_scratch_bytes: int
    are_short: bool
    """Whether there is no layer, or one that is too short for the kernel."""

    @classmethod
    def of(cls, rows: SubBlockRows, parts: int) -> _DigestedLayers:
        weights = np.array([layer_weight(layer) for layer in rows.layers], np.uint64)
        arrays = (rows.starts, rows.lengths, rows.ends, weights)
        arguments = (*map(_address, arrays), ctypes.c_size_t(len(rows.layers)))
        are_short = not rows.layers or int(rows.layer_bytes.min()) <= _SHORT
        return cls(arrays, arguments, ctypes.c_size_t(parts), rows.num_bytes if parts > 1 else 0, are_short)


def _kernel() -> Any:
    kernel = getattr(open_kernels(), "baton_digest_layers", None)
    if kernel is None:
        raise KernelsUnavailable("the kernel library was built from an older source: run `pip install -e .` again")
    kernel.restype = None
    return kernel


def _address(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _by_library(memory: KVMemory) -> BlockDigests:
    """Digests by the xxhash package, which holds the interpreter lock while it computes."""

    def digests(ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        rows, parts, block_bytes = digested_rows(memory, division), division.parts, memory.block_bytes
        blocks = (
            (ctypes.c_char * block_bytes).from_address(memory.base_address + i // parts * block_bytes) for i in ids
        )
        return [digest_of(memoryview(block).cast("B"), rows, i % parts) for i, block in zip(ids, blocks, strict=True)]

    return digests


def _of_copies(copied_to_host: Callable[[Sequence[int]], KVMemory]) -> BlockDigests:
    def digests(ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        by_block: dict[int, int] = {}
        parts_of = defaultdict[int, list[int]](list)
        for each in ids:
            parts_of[each // division.parts].append(each)
        blocks = list(parts_of)
        for first in range(0, len(blocks), _COPIED_AT_ONCE):
            some = blocks[first : first + _COPIED_AT_ONCE]
            copied = block_digests(copied_to_host(some))
            asked = [(each, at) for at, block in enumerate(some) for each in parts_of[block]]
            places = [at * division.parts + each % division.parts for each, at in asked]
            by_block.update(zip((each for each, _ in asked), copied(places, division), strict=True))
        return [by_block[each] for each in ids]

    return digests

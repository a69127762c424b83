"""Digests of KV blocks that lie on a GPU, computed there: eight bytes for each block come to the host."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import xxhash

from baton.engine.runner import KVMemory
from baton.runner.blocks.device_blocks import rows_of
from baton.runner.blocks.digest_definition import DIGEST_MODULUS, BlockDigests, digested_rows, layer_weight
from baton.runner.blocks.sub_blocks import WHOLE, Division, Int64Array, SubBlockRows

_log = logging.getLogger(__name__)

_WORD = 8
_SHORTEST = 241
"""Bytes of the shortest layer that the kernel hashes (triton_digest.py)."""
_GATHERED_BYTES = 16 << 20
"""Size of the sub-blocks that are put together at once."""
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Layers:
    """Where the layers of a sub-block begin, in words, their lengths in bytes, and their weights; on the device."""

    block_words: int
    starts: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Gather:
    """Puts the bytes of sub-blocks together, in their own order."""

    units: torch.Tensor
    """The memory in units of which all rows are whole numbers: flat."""
    block_units: int
    places: torch.Tensor
    """For each unit of a block's first sub-block its place in the block."""
    steps: torch.Tensor
    """How far it is to the same unit of the next sub-block."""
    at_once: int

    def __call__(self, ids: torch.Tensor, parts: int) -> torch.Tensor:
        """The bytes of these sub-blocks: [len(ids), units of a sub-block]."""
        firsts = (ids // parts * self.block_units)[:, None] + (ids % parts)[:, None] * self.steps
        return self.units[firsts + self.places]


class DeviceDigests:
    """`BlockDigests` by a kernel, on a CUDA stream of its own, so that they don't wait for the step that is computed.

    Divisions with a layer of at most 240 bytes, or of no whole number of words, are left to `by_copies`. May be called
    from any thread.
    """

    def __init__(self, memory: KVMemory, by_copies: BlockDigests) -> None:
        """Raises whatever Triton raises where it can't compile or start the kernel, and ValueError if the kernel
        computes something else than XXH3."""
        # Triton is there only where torch was built for GPUs.
        from baton.runner.backends.cuda.triton_digest import xxh3_constants, xxh3_of_layers

        self._memory, self._by_copies, self._kernel = memory, by_copies, xxh3_of_layers
        self._rows = rows_of(memory)
        self._device = self._rows.device
        self._stream = torch.cuda.Stream(self._device) if self._rows.is_cuda else None  # type: ignore[no-untyped-call]
        self._constants = xxh3_constants(self._device)
        self._layers_of = lru_cache(maxsize=64)(self._find_layers)
        self._gather_of = lru_cache(maxsize=64)(self._find_gather)
        with self._on_stream():
            self._check()

    def __call__(self, ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        layers = self._layers_of(division)
        if layers is None:
            return self._by_copies(ids, division)
        with self._on_stream():
            asked = torch.tensor(ids, dtype=torch.int64).to(self._device)
            if division.parts == 1:
                return self._hashes(self._rows.view(torch.uint64), asked, layers)
            gather = self._gather_of(division)
            computed: list[int] = []
            for first in range(0, len(ids), gather.at_once):
                some = gather(asked[first : first + gather.at_once], division.parts)
                numbers = torch.arange(some.shape[0], device=self._device)
                computed += self._hashes(some.view(torch.uint64), numbers, layers)
            return computed

    def _on_stream(self) -> torch.cuda.StreamContext | nullcontext[None]:
        # It makes the stream's device the current one of this thread, too.
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _hashes(self, memory: torch.Tensor, blocks: torch.Tensor, layers: _Layers) -> list[int]:
        where = (layers.starts, layers.lengths, layers.weights)
        digests = self._kernel(memory, layers.block_words, blocks, *where, self._constants)
        result: list[int] = digests.cpu().numpy().view(np.uint64).tolist()
        return result

    def _find_layers(self, division: Division) -> _Layers | None:
        """Where the layers of a division lie; None if the kernel can't hash them."""
        rows, block_bytes = digested_rows(self._memory, division), self._memory.block_bytes
        lengths, starts = rows.layer_bytes, rows.starts
        if division.parts > 1:
            # They lie one behind the other once they are put together.
            block_bytes, starts = rows.num_bytes, np.cumsum(lengths) - lengths
        sizes = [block_bytes, *starts.tolist(), *lengths.tolist()]
        if not rows.layers or lengths.min() < _SHORTEST or any(size % _WORD for size in sizes):
            return None
        if self._rows.data_ptr() % _WORD:
            return None
        weights = np.array([layer_weight(layer) for layer in rows.layers], np.int64)
        return _Layers(block_bytes // _WORD, *map(self._here, (starts // _WORD, lengths, weights)))

    def _find_gather(self, division: Division) -> _Gather:
        rows: SubBlockRows = digested_rows(self._memory, division)
        block_bytes, num_bytes = self._memory.block_bytes, rows.num_bytes
        unit = math.gcd(_WORD, block_bytes, *rows.starts.tolist(), *rows.lengths.tolist())
        counts = rows.lengths // unit
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        places, steps = np.repeat(rows.starts // unit, counts) + within, np.repeat(counts, counts)
        units = self._rows.view(_UNITS[unit]).view(-1)
        at_once = max(1, _GATHERED_BYTES // num_bytes)
        return _Gather(units, block_bytes // unit, self._here(places), self._here(steps), at_once)

    def _here(self, array: Int64Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _check(self) -> None:
        """Compile the kernel, and compare its digests of known bytes with those of the xxhash package."""
        content = np.random.default_rng(0).integers(0, 256, (2, 1360), np.uint8)
        starts, lengths, weights = np.array([0, 1088]), np.array([1088, 264]), np.array([1, 3])
        layers = _Layers(content.shape[1] // _WORD, *map(self._here, (starts // _WORD, lengths, weights)))
        memory = torch.from_numpy(content).to(self._device).view(torch.uint64)
        computed = self._hashes(memory, self._here(np.array([1, 0])), layers)
        pieces = list(zip(starts.tolist(), (starts + lengths).tolist(), weights.tolist(), strict=True))
        for block, digest in zip(content[::-1], computed, strict=True):
            wanted = sum(weight * xxhash.xxh3_64_intdigest(block[start:end].tobytes()) for start, end, weight in pieces)
            if digest != wanted % DIGEST_MODULUS:
                raise ValueError("the kernel computes other digests than the xxhash package")


def device_digests(memory: KVMemory, by_copies: BlockDigests) -> BlockDigests:
    """The digest function for blocks on a device; `by_copies` where there is no GPU that runs the kernel."""
    if not rows_of(memory).is_cuda:
        return by_copies
    try:
        return DeviceDigests(memory, by_copies)
    except Exception as error:  # of Triton's compiler or of the driver
        reason = (str(error).splitlines() or [""])[0]
        _log.warning(
            "KV blocks are copied to the host for their digests (--kv-digests sampled costs less), since the kernel "
            "fails with %s (%.200s)",
            type(error).__name__,
            reason,
        )
        return by_copies

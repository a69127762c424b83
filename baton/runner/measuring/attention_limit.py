"""Measures decode attention of one layer: our kernel on the paged cache against torch's on gathered blocks.

And requests that share blocks against requests that share none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch.nn import functional

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.cpu.kernels.huge_pages import zeros_for_reading
from baton.runner.backends.operations import Operations
from baton.runner.backends.paged_cache import CacheView
from baton.runner.measuring.limits import seconds_of
from baton.runner.model.weights import DTYPES
from baton.runner.torch_threads import torch_threads

REQUESTS, LENGTH, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 1024, 32, 8, 64, 16
_BLOCKS = LENGTH // BLOCK_SIZE
_HALF = KV_HEADS * BLOCK_SIZE * HEAD_DIM
"""Elements of one layer's keys (or values) in a block."""
_CACHES = 1.25
"""How many times larger than the processor's last-level cache the keys and values of all layers together are."""


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Medians in seconds of one layer's decode attention."""

    paged: float
    """Our kernel on the paged cache."""
    gathered: float
    """Blocks gathered, then torch's scaled_dot_product_attention with the query heads of a KV head as its rows."""
    apart: float
    """Our kernel where each request has a block more."""
    shared: float
    """The same, where all blocks but that last one are the same for all requests; by turns with `apart`."""
    shared_ratio: float
    """The median of the ratios of `shared` to `apart` in one turn."""


def attention_times(
    dtype: str, num_threads: int, operations: Operations, cache_bytes: int, repeats: int = 5
) -> AttentionTimes:
    """16 requests with 1024 keys each, 32 query and 8 KV heads of 64, blocks of 16 tokens in random places.

    Layer after layer, as a step does it, and of so many layers that no cache of the processor (`cache_bytes`: the last
    level) still has a layer's keys when its turn comes again. RuntimeError when the two don't compute the same.
    """
    layer_bytes = REQUESTS * _BLOCKS * 2 * _HALF * DTYPES[dtype].itemsize
    rig = _Rig(dtype, max(2, round(_CACHES * cache_bytes / layer_bytes)), operations)
    with torch.inference_mode():
        if not torch.allclose(rig.paged(1).float(), rig.gathered(1).float(), atol=2e-2):
            raise RuntimeError("the two attentions differ: what was measured is not the same work")
        paged = rig.median_of(rig.paged, repeats)
        with torch_threads(num_threads):
            gathered = rig.median_of(rig.gathered, repeats)
        turns = [(rig.median_of(rig.apart, 1), rig.median_of(rig.shared, 1)) for _ in range(repeats)]
    apart, shared = (median(column) for column in zip(*turns, strict=True))
    return AttentionTimes(paged, gathered, apart, shared, median(shared / apart for apart, shared in turns))


class _Rig:
    """Queries, and a cache of some layers, each of them with the same random keys and values."""

    def __init__(self, dtype: str, num_layers: int, operations: Operations) -> None:
        generator = torch.Generator().manual_seed(0)
        kind, count = DTYPES[dtype], REQUESTS * _BLOCKS
        values = torch.randn(count, 1, 2 * _HALF, generator=generator).to(kind)
        # On huge pages, as a runner's cache is.
        self._memory = zeros_for_reading(values.numel() * num_layers, kind)
        self._memory.view(count, num_layers, -1).copy_(values.expand(-1, num_layers, -1))
        # Gathered into the same memory every time: new pages would cost more than the copies.
        self._gathered_keys = torch.zeros(count * KV_HEADS, BLOCK_SIZE * HEAD_DIM, dtype=kind)
        self._gathered_values = torch.zeros_like(self._gathered_keys)
        self._query = torch.randn(REQUESTS, HEADS, HEAD_DIM, generator=generator).to(kind)
        self._tables = torch.randperm(count, generator=generator).view(REQUESTS, _BLOCKS)
        self._num_layers = num_layers
        self._operations = operations
        self._query_start = torch.arange(REQUESTS + 1, dtype=torch.int32)
        self._seq_lens = torch.full((REQUESTS,), LENGTH, dtype=torch.int32)
        self._block_tables = self._tables.to(torch.int32)
        last = self._block_tables.roll(1, 0)[:, :1]
        self._apart = torch.cat([self._block_tables, last], dim=1)
        self._shared = torch.cat([self._block_tables[:1].expand(REQUESTS, -1), last], dim=1)

    def paged(self, layer: int) -> torch.Tensor:
        """[requests, heads, head_dim]."""
        return self._attend(layer, self._seq_lens, self._block_tables)

    def apart(self, layer: int) -> torch.Tensor:
        """[requests, heads, head_dim], with one block more."""
        return self._attend(layer, self._seq_lens + BLOCK_SIZE, self._apart)

    def shared(self, layer: int) -> torch.Tensor:
        """[requests, heads, head_dim], with one block more, the others being those of the first request."""
        return self._attend(layer, self._seq_lens + BLOCK_SIZE, self._shared)

    def _attend(self, layer: int, seq_lens: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
        key_offset = layer * 2 * _HALF
        stride = self._num_layers * 2 * _HALF
        view = CacheView(
            self._memory,
            REQUESTS * _BLOCKS,
            stride,
            key_offset,
            key_offset + _HALF,
            KV_HEADS,
            BLOCK_SIZE,
            HEAD_DIM,
            HEAD_DIM,
        )
        how = AttentionFeatures(HEAD_DIM**-0.5)
        return self._operations.paged_attention(
            AttentionCall(self._query, view, self._query_start, seq_lens, block_tables, how)
        )

    def gathered(self, layer: int) -> torch.Tensor:
        """[requests, heads, head_dim]; one gather for the keys and one for the values, nothing is copied twice."""
        rows = self._memory.view(-1, BLOCK_SIZE * HEAD_DIM)
        first = (self._tables[:, None, :] * self._num_layers + layer) * 2 * KV_HEADS
        keys = (first + torch.arange(KV_HEADS)[None, :, None]).flatten()
        shape = (REQUESTS, KV_HEADS, LENGTH, HEAD_DIM)
        torch.index_select(rows, 0, keys, out=self._gathered_keys)
        torch.index_select(rows, 0, keys + KV_HEADS, out=self._gathered_values)
        key, value = self._gathered_keys.view(shape), self._gathered_values.view(shape)
        folded = self._query.view(REQUESTS, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        out = functional.scaled_dot_product_attention(folded, key, value, scale=HEAD_DIM**-0.5)
        return out.reshape(REQUESTS, HEADS, HEAD_DIM)

    def median_of(self, attend: Callable[[int], torch.Tensor], repeats: int) -> float:
        """The median of the seconds for one layer, over `repeats` passes through all layers."""

        def all_layers() -> None:
            for layer in range(self._num_layers):
                attend(layer)

        return median(seconds_of(all_layers, repeats)) / self._num_layers

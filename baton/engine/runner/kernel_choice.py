"""Which implementation of the operations this machine runs: the C kernels, or torch's own products without them."""

from __future__ import annotations

from typing import Any

import torch

from baton.engine.runner import kernels, torch_operations
from baton.engine.runner.kernels.cache import CacheView
from baton.engine.runner.operations import Activation, Operations
from baton.engine.runner.torch_operations import TorchOperations

_NEW = hasattr(kernels, "gated_linear")


class CompiledOperations:
    """The C kernels on a fixed number of threads."""

    def __init__(self, num_threads: int, numerics: str) -> None:
        self._threads = num_threads
        self._numerics = numerics

    def numerics(self) -> str:
        return self._numerics

    def pack(self, *weights: torch.Tensor) -> Any:
        return kernels.pack(*weights) if _NEW else kernels.pack(torch.cat(weights))

    def pack_gated(self, gate: torch.Tensor, up: torch.Tensor) -> Any:
        return kernels.pack_gated(gate, up) if _NEW else kernels.pack(torch.cat([gate, up]))

    def take_rows(self, weight: Any, index: torch.Tensor) -> torch.Tensor:
        if _NEW:
            return kernels.take_rows(weight, index)
        if weight.dtype == torch.float32:
            return weight.storage.view(-1, weight.padded_k, 16)[index // 16, :, index % 16]
        panels = weight.storage.view(-1, weight.padded_k // 2, 16, 2)
        return panels[index // 16, :, index % 16].flatten(1)[:, : weight.k]

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if _NEW:
            return kernels.linear(x, weight, bias, threads=self._threads)
        with _threads(self._threads):
            return kernels.linear(x, weight, bias)

    def gated_linear(self, x: torch.Tensor, weight: Any, *, activation: Activation) -> torch.Tensor:
        if _NEW:
            return kernels.gated_linear(x, weight, activation=activation, threads=self._threads)
        padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 64))
        gate, up = self.linear(padded, weight).float().chunk(2, -1)
        return (torch_operations.activate(gate.contiguous(), activation) * up).to(x.dtype)[: x.shape[0]]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        if _NEW:
            return kernels.rms_norm(x, weight, eps, plus_one=plus_one, threads=self._threads)
        return torch_operations.rms_norm(x, weight, eps, plus_one)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        if _NEW:
            kernels.rotate(x, cos, sin, threads=self._threads)
        else:
            torch_operations.rotate(x, cos, sin)

    def store_kv(self, key: torch.Tensor, value: torch.Tensor, cache: CacheView, slots: torch.Tensor) -> None:
        if _NEW:
            kernels.store_kv(key, value, cache, slots, threads=self._threads)
        else:
            torch_operations.store_kv(key, value, cache, slots)

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: CacheView,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if _NEW:
            return kernels.paged_attention(
                query,
                cache,
                query_start,
                seq_lens,
                block_tables,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                threads=self._threads,
            )
        if sinks is None and cache.key_dim == cache.value_dim:
            size = (cache.num_blocks, 1, 2, cache.num_kv_heads, cache.block_size, cache.key_dim)
            half = cache.value_offset - cache.key_offset
            stride = (cache.block_stride, cache.block_stride, half, cache.block_size * cache.key_dim, cache.key_dim, 1)
            six = cache.memory.as_strided(size, stride, cache.key_offset)
            with _threads(self._threads):
                return kernels.paged_attention(
                    query.contiguous(), six, 0, query_start, seq_lens, block_tables, scale, window, softcap
                )
        return TorchOperations(1).paged_attention(
            query,
            cache,
            query_start,
            seq_lens,
            block_tables,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )


from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_operations(num_threads: int) -> Operations:
    """The C kernels where they are built and run here, else torch's products; their numerics differ, so never silently.

    The reference is never chosen: it is a thousand times slower.
    """
    info = kernels.available()
    if not info:
        return TorchOperations(num_threads)
    return CompiledOperations(num_threads, f"kernels-{info.numerics}")

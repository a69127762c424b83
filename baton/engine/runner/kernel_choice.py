"""Which implementation of the four operations this machine runs: the C kernels, on as many threads as asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from baton.engine.runner import kernels
from baton.engine.runner.kernels import PackedWeight
from baton.engine.runner.operations import Operations
from baton.errors import ConfigError


class CompiledOperations:
    """The C kernels. They run on torch's number of threads, which is raised around each call where it is lower."""

    def __init__(self, num_threads: int, numerics: str) -> None:
        self._num_threads = num_threads
        self._numerics = numerics

    def numerics(self) -> str:
        return self._numerics

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        return kernels.pack(weight)

    def linear(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        with self._threads():
            return kernels.linear(x, weight, bias)

    def store_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, layer: int, slots: torch.Tensor
    ) -> None:
        kernels.store_kv(key, value, kv_cache, layer, slots)

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        with self._threads():
            return kernels.paged_attention(
                query, kv_cache, layer, query_start, seq_lens, block_tables, scale, window, softcap
            )

    @contextmanager
    def _threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        if before == self._num_threads:
            yield
            return
        torch.set_num_threads(self._num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def choose_operations(num_threads: int) -> Operations:
    """The C kernels; raises ConfigError with the way out when they are not built or don't run here.

    The reference is never chosen silently: it is a thousand times slower, and its bits differ from other nodes'.
    """
    info = kernels.available()
    if not info:
        raise ConfigError(info.reason)
    return CompiledOperations(num_threads, f"kernels-{info.numerics}")

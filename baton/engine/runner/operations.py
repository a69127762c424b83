"""The four operations whose rows must not depend on their neighbours, as an interface.

Two implementations, never mixed in one model: the C kernels (kernels/) and a slow, plain one (reference.py).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Operations(Protocol):
    """Row-invariant products and paged attention; a module can be one."""

    def numerics(self) -> str:
        """Names what decides the bits: equal names and equal models give equal bits."""
        ...

    def pack(self, weight: torch.Tensor) -> Any:
        """Prepare a weight [N, K] for `linear`; the argument is not kept."""
        ...

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K] times the packed weight [N, K] transposed, plus bias [N]: [M, N] in x's dtype."""
        ...

    def store_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, layer: int, slots: torch.Tensor
    ) -> None:
        """Write key and value [T, KH, D] into the layer's slots [T] (block * block_size + offset; negative: skip)."""
        ...

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
        """Causal attention of query [T, H, D] over the cache; returns [T, H, D], zero in rows of no sequence.

        Sequence b owns rows query_start[b] to query_start[b + 1], the last of its seq_lens[b] keys.
        """
        ...

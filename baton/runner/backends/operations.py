"""What a step is made of, as an interface: operations whose rows must not depend on their neighbours.

Three implementations, never mixed in one model: the C kernels (kernel_choice.py), torch's own products in calls of one
fixed number of rows (torch_operations.py), and a slow, plain one (reference.py).
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch

from baton.runner.backends.cpu.kernels.cache import CacheView
from baton.runner.backends.cpu.kernels.program import Program

Activation = Literal["silu", "gelu", "gelu_tanh"]


class Operations(Protocol):
    """Row-invariant products, norms and paged attention; a module can be one. T and M count rows."""

    def numerics(self) -> str:
        """Names what decides the bits: equal names and equal models give equal bits."""
        ...

    def program(self, dtype: torch.dtype) -> Program | None:
        """An empty program of these operations, or None where there are only single calls."""
        ...

    def pack(self, *weights: torch.Tensor) -> Any:
        """Prepare weights [N_i, K], stacked over their outputs, for `linear`; the arguments are not kept."""
        ...

    def pack_gated(self, gate: torch.Tensor, up: torch.Tensor) -> Any:
        """Prepare two weights [N, K] for `gated_linear`; the arguments are not kept."""
        ...

    def take_rows(self, weight: Any, index: torch.Tensor) -> torch.Tensor:
        """Rows index [T] of what `pack` was given, bit for bit: [T, K]."""
        ...

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K] times the packed weight [N, K] transposed, plus bias [N]: [M, N] in x's dtype."""
        ...

    def gated_linear(self, x: torch.Tensor, weight: Any, *, activation: Activation) -> torch.Tensor:
        """activation(x times gate) times (x times up), both transposed: x [M, K] to [M, N]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        """x [..., N] over its root mean square (float32), times the weight [N], or times 1 + weight."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + residual in their dtype, and its `rms_norm`; both [..., N]."""
        ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate the first R columns of x [T, H, D] in place by the angles of cos and sin [T, R], halves equal."""
        ...

    def store_kv(self, key: torch.Tensor, value: torch.Tensor, cache: CacheView, slots: torch.Tensor) -> None:
        """Write key [T, KH, KD] and value [T, KH, VD] into slots [T] (block * block_size + offset; negative: skip)."""
        ...

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
        """Causal attention of query [T, H, KD] over the cache; returns [T, H, VD], zero in rows of no sequence.

        Sequence b owns rows query_start[b] to query_start[b + 1], the last of its seq_lens[b] keys; there may be none.
        `sinks` [H] is one more score for each head, without a value.
        """
        ...

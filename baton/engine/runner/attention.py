"""Paged attention as transformers sees it: one function in its AttentionInterface, and no masks.

Every attention module carries a `baton_attend` that the function hands queries, keys and values to: first a
`ProbeAttention` that only looks at their shapes, then the `PagedAttention` that owns the step. The cache is one
tensor, block-major: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from baton.engine.runner.operations import Operations
from baton.errors import ConfigError

ATTENTION_NAME = "baton_paged"

_UNSUPPORTED_KEYWORDS = {"s_aux": "attention sinks", "position_bias": "a position bias", "alibi": "a position bias"}


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """What distinguishes one attention layer from another besides its weights."""

    scale: float
    window: int | None
    """Keys a query sees, itself included; None is all of them."""
    softcap: float | None


class UnsupportedAttention(ConfigError):
    """The model attends in a way that the paged cache or the kernels can't do yet."""


class Attend(Protocol):
    """Takes one layer's query [T, H, D], key and value [T, KH, D]; returns [T, H, D]."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionParameters
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which rows of a step belong to whom; rows past the last sequence's are padding.

    query_start int32 [B + 1], seq_lens int32 [B] (keys of the sequence, this step's included), block_tables int32
    [B, W], slots int64 [T] (block * block_size + offset; negative for padding).
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor


class PagedAttention:
    """Stores a step's keys and values in the cache and reads the history back from it."""

    def __init__(self, operations: Operations, kv_cache: torch.Tensor) -> None:
        self._operations = operations
        self._kv_cache = kv_cache
        self.layout: StepLayout | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionParameters
    ) -> torch.Tensor:
        layout = self.layout
        if layout is None:
            raise RuntimeError("attention outside of a step")
        self._operations.store_kv(key.contiguous(), value.contiguous(), self._kv_cache, layer, layout.slots)
        return self._operations.paged_attention(
            query.contiguous(),
            self._kv_cache,
            layer,
            layout.query_start,
            layout.seq_lens,
            layout.block_tables,
            how.scale,
            how.window,
            how.softcap,
        )


@dataclass(slots=True)
class ProbeAttention:
    """Computes nothing, remembers which layers there are; raises UnsupportedAttention if they don't fit one cache."""

    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionParameters
    ) -> torch.Tensor:
        if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
            raise UnsupportedAttention("keys and values of different widths (latent attention) are not supported yet")
        shape = (key.shape[1], key.shape[2])
        if self.num_layers and shape != (self.num_kv_heads, self.head_dim):
            raise UnsupportedAttention("layers with different key and value shapes are not supported yet")
        self.num_kv_heads, self.head_dim = shape
        self.num_layers = max(self.num_layers, layer + 1)
        return torch.zeros_like(query)


def bind(module: nn.Module, attend: Attend) -> None:
    """Let every attention layer of a model hand its rows to `attend`."""
    for part in module.modules():
        if getattr(part, "layer_idx", None) is not None:
            # Past nn.Module's own __setattr__: this is neither a parameter nor a submodule.
            object.__setattr__(part, "baton_attend", attend)


def _forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' calling convention: query [1, H, T, D], key and value [1, KH, T, D]; returns [1, T, H, D]."""
    for name, meaning in _UNSUPPORTED_KEYWORDS.items():
        if keywords.get(name) is not None:
            raise UnsupportedAttention(f"a model with {meaning} is not supported yet")
    how = AttentionParameters(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or None,
        softcap=softcap or None,
    )
    attend: Attend = module.baton_attend
    out = attend.attend(
        module.layer_idx, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), how
    )
    return out.unsqueeze(0), None


def _no_mask(*_arguments: Any, **_keywords: Any) -> None:
    """Who sees whom follows from the block tables; there is never a mask tensor."""


def register() -> None:
    """Make the function known to transformers under ATTENTION_NAME."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)

"""The three kinds of attention of a model with an encoder and a decoder, as transformers calls them.

transformers' own modules compute the layers. Each attention module has an attribute `baton_attends`, to which it passes
queries, keys and values: the decoder's self-attention stores keys and values at the positions of its tokens, the
cross-attention those of the encoder's rows at the positions before them (baton/model_formats/encoder_decoders.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from baton.errors import ConfigError
from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.operations import Operations
from baton.runner.backends.paged_cache import CacheView, read_blocks
from baton.runner.model.attention import ENCODER_DECODER_ATTENTION, dense_rows, register_without_masks

_SELF_NAMES = frozenset({"self_attn", "SelfAttention"})
_CROSS_NAMES = frozenset({"encoder_attn", "EncDecAttention"})


@dataclass(frozen=True, slots=True)
class Sequences:
    """What a step's rows attend to: rows of the decoder, or of the cross-attention, by sequence.

    In the cross-attention each row of the decoder is a sequence of its own: it attends to all rows of its input.
    """

    slots: torch.Tensor
    """Int64: where the step's keys and values are stored, -1: nowhere."""
    query_start: torch.Tensor
    """Int32 [B + 1]: the first row of each sequence."""
    seq_lens: torch.Tensor
    """Int32 [B]: keys of each sequence."""
    block_tables: torch.Tensor
    """Int32 [B, W]: blocks of these keys."""


class Attends(Protocol):
    """Computes attention: query [T, H, D], key and value [S, H, D] to [T, H, D]."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, bias: torch.Tensor | None
    ) -> torch.Tensor: ...


class EncoderAttention:
    """Attention of all rows of one input to all of them; `bias` [1, H, T, T] is added to the scores."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, bias: torch.Tensor | None
    ) -> torch.Tensor:
        query, key, value = (rows.transpose(0, 1)[None] for rows in (query, key, value))
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
        return out[0].transpose(0, 1)


class DecoderAttention:
    """Attention of one layer of the decoder over the paged cache, to its own tokens or to the encoder's rows."""

    def __init__(self, operations: Operations, cache: CacheView, distance_bias: torch.Tensor | None = None) -> None:
        """`distance_bias` [H, D]: see `AttentionFeatures`."""
        self._operations = operations
        self._cache = cache
        self._distance_bias = distance_bias
        self.sequences: Sequences | None = None
        """The sequences of the step that is being computed; None between steps."""
        self.noted_heads: Sequence[int] = ()
        """The heads whose scaled queries are noted."""
        self.noted_rows: torch.Tensor | None = None
        """Int64 [N]: the rows of the step whose queries are noted."""
        self.noted: torch.Tensor | None = None
        """Float32 [N, noted heads, D]: the queries of the step that is being computed."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, bias: torch.Tensor | None
    ) -> torch.Tensor:
        at = self.sequences
        if at is None:
            raise RuntimeError("attention was called outside of a step")
        self._operations.store_kv(dense_rows(key), dense_rows(value), self._cache, at.slots)
        if self.noted_heads:
            self.noted = query[self.noted_rows][:, list(self.noted_heads)].to(torch.float32) * scale
        how = AttentionFeatures(scale, distance_bias=self._distance_bias)
        return self._operations.paged_attention(
            AttentionCall(dense_rows(query), self._cache, at.query_start, at.seq_lens, at.block_tables, how)
        )

    def keys(self, blocks: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The first keys in these blocks, float32 [H, num_rows, D]."""
        return read_blocks(self._cache, blocks, self._cache.memory.dtype)[0][:, :num_rows].to(torch.float32)


class NoAttention:
    """Zeros in place of attention, for finding out what else a step computes."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], value.shape[2])


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The attention modules of one layer of a decoder."""

    own: Any
    cross: Any

    @property
    def num_heads(self) -> int:
        """H, which is the number of heads of keys and values, too."""
        return int(getattr(self.own, "num_heads", 0) or self.own.n_heads)

    @property
    def head_dim(self) -> int:
        """D of queries, keys and values."""
        return int(getattr(self.own, "head_dim", 0) or self.own.key_value_proj_dim)


def decoder_layers(decoder: nn.Module) -> list[DecoderLayer]:
    """The attention modules of a decoder's layers, in order."""
    layers: dict[str, list[Any]] = {"own": [], "cross": []}
    for path, part in decoder.named_modules():
        name = path.rpartition(".")[2]
        if name in _SELF_NAMES:
            layers["own"].append(part)
        elif name in _CROSS_NAMES:
            layers["cross"].append(part)
    return [DecoderLayer(own, cross) for own, cross in zip(layers["own"], layers["cross"], strict=True)]


def attend_with(module: nn.Module, attends: Attends) -> None:
    """Make an attention module pass its rows to `attends`."""
    # nn.Module's own __setattr__ would register it as a submodule.
    object.__setattr__(module, "baton_attends", attends)


def attend_in_encoder(encoder: nn.Module) -> None:
    """Make all attention modules of an encoder attend to the whole input."""
    for path, part in encoder.named_modules():
        if path.rpartition(".")[2] in _SELF_NAMES:
            attend_with(part, EncoderAttention())


def distance_bias_of(decoder: nn.Module, most_tokens: int) -> torch.Tensor | None:
    """What T5's decoder adds to scores by distance, float32 [H, distances]; None for one that adds nothing.

    `most_tokens`: those of the decoder, between which no distance is longer. Raises ConfigError.

    transformers' modules compute none from here on: they would for all pairs of a step's rows.
    """
    for layer in decoder_layers(decoder):
        own = layer.own
        if not getattr(own, "has_relative_attention_bias", False):
            continue
        longest = own.relative_attention_max_distance
        # Buckets grow with the logarithm of their distance to the half of their number.
        if longest <= own.relative_attention_num_buckets // 2:
            raise ConfigError(
                f"relative_attention_max_distance is {longest} in config.json, and its "
                f"{own.relative_attention_num_buckets} buckets reach beyond it; copy it again"
            )
        bucket = own._relative_position_bucket(
            -torch.arange(min(longest, most_tokens) + 1),
            bidirectional=False,
            num_buckets=own.relative_attention_num_buckets,
            max_distance=longest,
        )
        weight = own.relative_attention_bias.weight.detach()
        own.compute_bias = _no_bias
        table: torch.Tensor = weight[bucket.to(weight.device)].T.to(torch.float32).contiguous()
        return table
    return None


def _no_bias(*_arguments: Any, **_keywords: Any) -> torch.Tensor:
    """Returns no numbers: the paged attention adds the decoder's bias."""
    return torch.empty(0)


def _forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **_keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [1, H, T, D], key and value [1, H, S, D] to [1, T, H, D]."""
    attends: Attends = module.baton_attends
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    query, key, value = (rows[0].transpose(0, 1) for rows in (query, key, value))
    return attends.attend(query, key, value, scale, position_bias).unsqueeze(0), None


def register() -> None:
    """Register this attention with transformers under ENCODER_DECODER_ATTENTION.

    It needs no masks: one input is encoded at a time, and the decoder's keys follow from the block tables.
    """
    register_without_masks(ENCODER_DECODER_ATTENTION, _forward)

"""Paged attention as transformers calls it: one function in its AttentionInterface, without masks.

Every attention module has an attribute `baton_attend`, to which it passes queries, keys and values: first a
`ProbeAttention`, which only looks at their shapes, then the `PagedAttention` of the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from baton.engine.runner import KVLayout, LayerState
from baton.errors import ConfigError
from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures, StepLayout
from baton.runner.backends.cpu.kernels.attention import BFLOAT16_BYTES
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.head_rows import HeadRows
from baton.runner.backends.key_selection import SelectionCall
from baton.runner.backends.operations import Operations
from baton.runner.backends.paged_cache import CacheView
from baton.runner.backends.ranks.ranks import ONE_RANK, Ranks
from baton.runner.model.checkpoint import configs_of_layers
from baton.runner.model.states.keepers import (
    KeepStates,
    PagedStates,
    StatesOfOwnParts,
    groups_of,
)
from baton.runner.parts import OwnHeads, Shard

ATTENTION_NAME = "baton_paged"
ENCODER_DECODER_ATTENTION = "baton_encoder_decoder"
"""The attention of models with an encoder and a decoder; see baton/runner/encoder_decoder/attention.py."""
KINDS_WITHOUT_CACHE = frozenset({"mlp", "moe"})
"""The layers, by transformers' names, that look at each token alone."""
LAYER_ARGUMENT = "layer_idx"
"""The name under which layers tell their parts the number of the layer."""
_TOLD_WITH_CALLS = -1
"""What transformers has in place of the number of an attention's layer, if several layers share its weights."""

_WITHOUT_EFFECT = frozenset({"position_ids", "cache_position"})
"""What layers tell their attention that changes no result: the rows are rotated, and their places in the cache known.

Any other keyword that `_forward` doesn't name is refused, unless its value is None, False or 0, which ask for nothing.
"""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParameters(AttentionFeatures):
    """The parameters of an attention layer besides its weights."""

    num_kv_heads: int = field(kw_only=True)
    """KH of the whole layer, of which a rank may have a part."""
    values_in_keys: bool = False
    """Whether a value is the first numbers of its key, so that keys alone are kept."""


def of_own_heads(how: AttentionParameters, own: OwnHeads) -> AttentionParameters:
    """The parameters of a rank's own heads; sinks are copied."""
    if how.sinks is None:
        return how
    sinks = how.sinks.detach()[own.queries.start : own.queries.stop].clone()
    return replace(how, sinks=sinks)


def heads_in(rows: torch.Tensor, heads: range) -> torch.Tensor:
    """Some of the heads of rows [T, H, D], which share their memory."""
    return rows[:, heads.start : heads.stop]


class UnsupportedAttention(ConfigError):
    """The model needs a kind of attention that the paged cache or the kernels can't compute."""


class Attend(Protocol):
    """Computes one layer's attention: query [T, H, KD], key [T, KH, KD] and value [T, KH, VD] to [T, H, VD].

    H and KH count the heads of this rank. With `sampling` the query has only the rows that sample; key and value have
    all rows. Without `stores` key and value are in the cache already. `selected`: what `select` gave for these rows.
    """

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        how: AttentionParameters,
        *,
        sampling: bool = False,
        stores: bool = True,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class AttendsToLatents(Protocol):
    """What attends in the place of an attention whose heads share latents in place of keys and values."""

    def attend(
        self,
        attend: Attend,
        layer: int,
        query: torch.Tensor,
        latent: torch.Tensor,
        how: AttentionParameters,
    ) -> torch.Tensor:
        """The outputs of all heads [T, H, VD], from queries of their keys [T, H, KD] and latents as keys of one head,
        [T, 1, L + R]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KeyScores:
    """What selects the keys to which rows attend (key_selection.py)."""

    query: torch.Tensor
    """[T, H, D]"""
    weights: torch.Tensor
    """float32 [T, H]"""
    first: int
    """Where a key in the cache has the D numbers for these queries."""
    scale: float
    most: int
    """How many keys a row attends to at most."""


class AttendOrSelect(Attend, Protocol):
    """Computes one layer's attention, and selects the keys to which rows attend."""

    def select(self, layer: int, key: torch.Tensor, scores: KeyScores, *, sampling: bool = False) -> torch.Tensor:
        """Store keys [T, KH, KD], in which values are, and return the selection int64 [T, W].

        With `sampling` the scores are of the rows that sample alone.
        """
        ...


class AttendOrKeep(Attend, Protocol):
    """Computes one layer's attention, or what it asks for of the state that it keeps instead."""

    @property
    def states(self) -> KeepStates: ...


def cache_views(memory: torch.Tensor, layout: KVLayout, shard: Shard) -> dict[int, CacheView]:
    """Each layer's view of the blocks of its group, in a flat block-major cache [num_blocks * block_elements].

    Layers that keep a state have none. A view has the key/value heads of the shard. A cache in 8 bits is int8 memory,
    also for fp8.
    """
    if layout.dtype == "fp8":
        memory = memory.view(torch.float8_e4m3fn)
    views: dict[int, CacheView] = {}
    for group in layout.groups:
        offset = 0
        for index in group.layers:
            layer = layout.layers[index]
            if isinstance(layer, LayerState):
                break  # and so are all others of the group
            heads = shard.kv_heads(layer.num_kv_heads)
            first = heads.start
            size, all_heads = layout.block_size, layer.num_kv_heads
            keys = offset + first * size * layer.key_dim
            values = offset + size * (all_heads * layer.key_dim + first * layer.value_dim)
            scales = offset + size * (layer.token_elements + first * BFLOAT16_BYTES) if layout.has_scales else None
            views[index] = CacheView(
                memory=memory,
                num_blocks=memory.numel() // layout.block_elements,
                block_stride=layout.block_elements,
                key_offset=keys,
                value_offset=keys if layer.values_in_keys else values,
                num_kv_heads=len(heads),
                block_size=size,
                key_dim=layer.key_dim,
                value_dim=layer.value_dim,
                scale_offset=scales,
                heads_of_block=all_heads,
                values_in_keys=layer.values_in_keys,
            )
            offset += layout.layer_elements(index)
    return views


class PagedAttention:
    """Stores a step's keys and values in the cache, and attends over the cache."""

    def __init__(self, operations: Operations, memory: torch.Tensor, layout: KVLayout, layers: Sequence[int]) -> None:
        """`memory`: the cache, flat, [num_blocks * block_elements]. `layers`: the model's layer of each in `layout`."""
        self._operations = operations
        views = cache_views(memory, layout, operations.ranks.shard)
        self._caches = {layers[entry]: view for entry, view in views.items()}
        self._groups = groups_of(layout, layers, views)
        self.layout: StepLayout | None = None
        """The step that is being computed; None between steps."""
        self.states = PagedStates(operations, memory, layout, layers, lambda: self.layout)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        how: AttentionParameters,
        *,
        sampling: bool = False,
        stores: bool = True,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layout, cache, group = self._place_of(layer)
        work = layout.sample_work if sampling else layout.work
        if stores:
            own_values = None if cache.values_in_keys else dense_rows(value)
            self._operations.store_kv(dense_rows(key), own_values, cache, layout.slots[group])
        return self._operations.paged_attention(
            AttentionCall(
                dense_rows(query),
                cache,
                layout.sample_start if sampling else layout.query_start,
                layout.seq_lens,
                layout.block_tables[group],
                how,
                selected,
                work[group] if work else None,
            )
        )

    def prepare_heads(self, layer: int, rows: HeadRows, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """As `Operations.prepare_heads`: what comes before an attention that stores nothing more."""
        layout, cache, group = self._place_of(layer)
        return self._operations.prepare_heads(rows, cos, sin, cache, layout.slots[group])

    def select(self, layer: int, key: torch.Tensor, scores: KeyScores, *, sampling: bool = False) -> torch.Tensor:
        layout, cache, group = self._place_of(layer)
        self._operations.store_kv(dense_rows(key), None, cache, layout.slots[group])
        return self._operations.select_keys(
            SelectionCall(
                scores.query,
                scores.weights,
                cache,
                scores.first,
                layout.sample_start if sampling else layout.query_start,
                layout.seq_lens,
                layout.block_tables[group],
                scores.scale,
                scores.most,
            )
        )

    def _place_of(self, layer: int) -> tuple[StepLayout, CacheView, int]:
        """The step, and the cache and the group of a layer."""
        if self.layout is None:
            raise RuntimeError("attention was called outside of a step")
        return self.layout, self._caches[layer], self._groups[layer]

    def record(
        self,
        program: Program,
        layer: int,
        query: Rows,
        key: Rows,
        value: Rows,
        how: AttentionParameters,
        *,
        into: str,
        gathers: bool = True,
    ) -> Rows:
        """Append to a program what `attend` does; the query has all rows or only those that sample.

        `gathers`: as in `record_reading`.
        """
        self.record_storing(program, layer, key, value)
        return self.record_reading(program, layer, query, how, into=into, gathers=gathers)

    def record_storing(self, program: Program, layer: int, key: Rows, value: Rows) -> None:
        """Append to a program the storing of keys and values in the cache."""
        program.store_kv(key, value, self._caches[layer], self._groups[layer])

    def record_reading(
        self,
        program: Program,
        layer: int,
        query: Rows,
        how: AttentionParameters,
        *,
        into: str,
        key_dim: int | None = None,
        selected: Rows | None = None,
        gathers: bool = True,
    ) -> Rows:
        """Append to a program what `attend` does with keys and values that are in the cache.

        `key_dim`: how many numbers of a key give its scores; None: all. `selected`: what `record_selecting` gave.
        Without `gathers` the result is of a rank's own heads.
        """
        cache, group = self._caches[layer], self._groups[layer]
        return program.paged_attention(
            query, cache, group, how, into=into, key_dim=key_dim, selected=selected, gathers=gathers
        )

    def record_selecting(
        self, program: Program, layer: int, query: Rows, weights: Rows, *, first: int, scale: float, most: int
    ) -> Rows:
        """Append to a program what `select` does with keys in the cache; the numbers are those of KeyScores."""
        cache, group = self._caches[layer], self._groups[layer]
        return program.select_keys(query, weights, cache, group, first=first, scale=scale, most=most)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] itself if each row is contiguous, as the kernels need it; otherwise a contiguous copy."""
    strides, width = x.stride(), x.shape[2]
    return x if strides[2] == 1 and strides[1] == width else x.contiguous()


class AttendOwnHeads:
    """Takes this rank's heads out of queries, keys and values of all heads, and gathers what all ranks attended."""

    def __init__(self, attend: AttendOrKeep, ranks: Ranks) -> None:
        self._attend = attend
        self._ranks = ranks
        self.states = StatesOfOwnParts(attend.states, ranks)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        how: AttentionParameters,
        *,
        sampling: bool = False,
        stores: bool = True,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shard = self._ranks.shard
        own = shard.heads(query.shape[1], key.shape[1])
        attended = self._attend.attend(
            layer,
            heads_in(query, own.queries),
            heads_in(key, own.kv),
            heads_in(value, own.kv),
            of_own_heads(how, own),
            sampling=sampling,
            stores=stores,
            selected=selected,
        )
        rows = attended.reshape(attended.shape[0], -1)
        every = self._ranks.gather(rows, [rows.shape[1]] * shard.size)
        return every.view(every.shape[0], query.shape[1], -1)


def number_layers(module: nn.Module, num_layers: int) -> None:
    """Give parts that are told the number of their layer with each call, as zamba2's attention, that number for
    themselves: as `baton_layer`, and to attention as `layer_idx`."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) == num_layers:
            for index, layer in enumerate(part):
                parts: Iterator[Any] = layer.modules()
                for inner in parts:
                    if getattr(inner, "layer_idx", None) == _TOLD_WITH_CALLS:
                        inner.layer_idx = index
                    if inner is not layer and LAYER_ARGUMENT in inspect.signature(inner.forward).parameters:
                        object.__setattr__(inner, "baton_layer", index)


def bind(module: nn.Module, attend: AttendOrKeep, ranks: Ranks = ONE_RANK) -> None:
    """Make every layer of a model pass its rows to `attend`: those of this rank's heads."""
    of_all_heads = attend if ranks.shard.size == 1 else AttendOwnHeads(attend, ranks)
    for part in module.modules():
        if getattr(part, "layer_idx", None) is not None:
            has_own_heads = hasattr(part, "own_heads")
            # nn.Module's own __setattr__ would register it as a submodule.
            object.__setattr__(part, "baton_attend", attend if has_own_heads else of_all_heads)


def _forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [1, H, T, KD], key and value [1, KH, T, D] to [1, T, H, VD].

    Raises UnsupportedAttention for whatever is asked that the paged attention does not compute.
    """
    require_no_mask(module, attention_mask)
    unknown = [name for name, value in keywords.items() if name not in _WITHOUT_EFFECT and _asks(value)]
    if is_causal is False and getattr(module, "is_causal", True):
        unknown.append("is_causal=False")
    if unknown:
        raise UnsupportedAttention(
            f"its layer {module.layer_idx} asks for attention with {', '.join(unknown)}, which is not computed here"
        )
    chunk = _chunk_of(module)
    how = AttentionParameters(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        num_kv_heads=key.shape[1],
        window=chunk or sliding_window or None,
        in_chunks=chunk is not None,
        softcap=softcap or None,
        sinks=s_aux,
    )
    attend: Attend = module.baton_attend
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    latents: AttendsToLatents | None = getattr(module, "baton_latents", None)
    if latents is not None and s_aux is not None:
        raise UnsupportedAttention(f"its layer {module.layer_idx} has latents and attention sinks")
    if latents is None:
        out = attend.attend(module.layer_idx, *rows, how)
    else:
        out = latents.attend(attend, module.layer_idx, *rows[:2], replace(how, values_in_keys=True))
    return out.unsqueeze(0), None


def _chunk_of(module: Any) -> int | None:
    """The number of tokens of a chunk, if a layer's queries attend to keys of their chunk alone; else None."""
    # Layers tell only their masks.
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    if module.layer_idx >= len(kinds) or kinds[module.layer_idx] != "chunked_attention":
        return None
    chunk: int = module.config.attention_chunk_size
    return chunk


def _asks(value: object) -> bool:
    return not (value is None or (isinstance(value, bool | int | float) and not value))


def require_windows(architecture: str, config: Any, windows: Mapping[int, int | None]) -> None:
    """Raise UnsupportedAttention if layers tell masks of their windows, but not their attention: `windows`."""
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    layers = configs_of_layers(config)
    hidden = [
        index
        for index, kind in enumerate(kinds)
        if kind == "sliding_attention" and index in windows and windows[index] is None
        if getattr(layers[min(index, len(layers) - 1)], "sliding_window", None)
    ]
    if hidden:
        numbers = ", ".join(map(str, hidden))
        raise UnsupportedAttention(
            f"{architecture} tells the windows of its layers {numbers} to their masks alone, which is not supported"
        )


def require_no_mask(module: Any, mask: object) -> None:
    """Raise UnsupportedAttention for a mask: `_no_mask` makes none, so the model has made it."""
    if mask is not None:
        raise UnsupportedAttention(
            f"its layer {module.layer_idx} attends through a mask that the model makes itself, and here the keys of a "
            "token follow from its position and a window alone"
        )


def _no_mask(*_arguments: Any, **_keywords: Any) -> None:
    """Returns no mask: which keys a query attends to follows from the block tables."""


def register() -> None:
    """Register Baton's attention with transformers under ATTENTION_NAME."""
    register_without_masks(ATTENTION_NAME, _forward)


def register_without_masks(name: str, forward: Callable[..., Any]) -> None:
    """Register an attention with transformers for which no masks are made."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, _no_mask)

"""Finds out what an attention module of transformers does with its rows, by comparing what it passes to attention."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

import torch
from torch import nn

from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import rotate
from baton.runner.model.attention import EchoAttention, heads_in
from baton.runner.model.comparison import (
    KINDS,
    LAYOUTS,
    NUM_ROWS,
    agree,
    echoed,
    like_input,
    linears_of,
    probe_places,
    random_angles,
)
from baton.runner.model.fused.attention import (
    AngleLayout,
    AttentionWeights,
    FusedAttention,
    OutputGate,
    QueryScale,
    Rotation,
)
from baton.runner.model.fused.rows import AnyNorm, FusedLayerNorm

_LARGE = 1000.0
"""Attention is compared for as many rows that are so much larger, too, since some of its numbers may be bounded."""
_GATE_ACTIVATIONS: tuple[Literal["sigmoid", "softplus"], ...] = ("sigmoid", "softplus")
_PROJECTION_NAMES = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("query_key_value",), ("c_attn",))
_OUT_NAMES = (("o_proj",), ("out_proj",), ("dense",), ("c_proj",))
_TAKEN_BY_OTHERS = {"key_value_states", "encoder_hidden_states"}
"""What attention to another text is given."""
_GATE_NAMES = (("gate_proj",), ("g_proj",))
_HEAD_NORM_NAMES = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))
"""What models call the parts of attention; what the parts compute is found out."""


class NotRecognised(Exception):
    """A module looks like attention, but FusedAttention does not compute the same; the message says what differs."""


def fused_attention(
    child: Any,
    operations: Operations,
    generator: torch.Generator,
    widths: list[int],
    angle_dtypes: set[torch.dtype],
) -> FusedAttention | None:
    """None for a module that is not attention; raises NotRecognised if FusedAttention does not compute the same."""
    weights = None if getattr(child, "layer_idx", None) is None else _attention_weights(child)
    if weights is None:
        return None
    first = next(iter(weights.projections.values()))
    rows = torch.randn(1, 2 * NUM_ROWS, first.in_features, dtype=torch.float32, generator=generator)
    rows[:, NUM_ROWS:] *= _LARGE
    x = like_input(first, rows)
    if strange := angle_dtypes - {x.dtype, torch.float32}:
        raise NotRecognised(f"its rotary angles are {strange.pop()}, and its rows {x.dtype}")
    if len(angle_dtypes) > 1:
        raise NotRecognised("its rotary angles have several dtypes")
    why, is_called = "it takes no rotary angles", False
    angle_dtype = next(iter(angle_dtypes), x.dtype)
    for width, layout in product(widths or [0], LAYOUTS):
        angles = random_angles(width, layout, generator, 2 * NUM_ROWS)
        cos, sin = (part.to(x.device, angle_dtype) for part in (angles.cos(), angles.sin()))
        try:
            echo, _ = echoed(child, x, (cos, sin))
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            # The module takes angles of another width, or other arguments.
            why = why if is_called else f"called with {width} angles it raised {type(error).__name__}: {error}"
            continue
        if echo.how is None:
            why = "it does not call attention through transformers' AttentionInterface"
            continue
        if len(echo.seen) > 1:
            raise NotRecognised(f"it calls attention {len(echo.seen)} times")
        is_called = True
        query, key, value = echo.seen[0]
        heads = (query.shape[1], key.shape[1], key.shape[2])
        if value.shape != key.shape or query.shape[2] != key.shape[2]:
            raise NotRecognised("keys and values have different shapes")
        norms = _head_norms(child, heads)
        why = "no known kind of rotation gives the same result"
        for laid_out, bound in product(_layouts(weights, heads), _bounds(value)):
            rotation = _rotation(child, laid_out, norms, bound, x[0], cos[0], sin[0], layout, echo.seen[0])
            if rotation is None:
                continue
            for gate in _output_gates(laid_out, heads):
                fused = FusedAttention(operations, child.layer_idx, laid_out, heads, norms, echo.how, rotation, gate)
                if _same_attention(child, fused, x, cos, sin):
                    return fused
            why = "its result is changed before the last product"
    raise NotRecognised(why)


def _bounds(value: torch.Tensor) -> list[float | None]:
    """What queries, keys and values may be bounded by: nothing, or what many values of the large rows are."""
    large = value[NUM_ROWS:].float().abs()
    return [None, float(large.max())] if int((large == large.max()).sum()) > 1 else [None]


def _layouts(weights: AttentionWeights, heads: tuple[int, int, int]) -> list[AttentionWeights]:
    """The weights with the orders in which one product may give queries, keys and values."""
    if len(weights.projections) > 1 or heads[0] != heads[1]:
        return [weights]
    return [weights, weights._replace(by_head=True)]


def _attention_weights(child: Any) -> AttentionWeights | None:
    """None for a module that is not attention; raises NotRecognised for one that takes no angles."""
    out = linears_of(child, _OUT_NAMES)
    projections = linears_of(child, _PROJECTION_NAMES)
    if out is None or projections is None:
        return None
    taken = inspect.signature(type(child).forward).parameters
    if _TAKEN_BY_OTHERS & taken.keys() and getattr(child, "is_cross_attention", True):
        raise NotRecognised("it takes other arguments than rows and rotary angles")
    gate = next(iter((linears_of(child, _GATE_NAMES) or {}).items()), None)
    return AttentionWeights(projections, next(iter(out.items())), gate)


def _head_norms(child: Any, heads: tuple[int, int, int]) -> tuple[AnyNorm | None, AnyNorm | None]:
    """The norms of queries and keys, of each head or of all together. Raises NotRecognised for others."""
    num_heads, num_kv_heads, dim = heads
    for names in _HEAD_NORM_NAMES:
        query, key = (getattr(child, name, None) for name in names)
        if query is None and key is None:
            continue
        if not isinstance(query, AnyNorm) or not isinstance(key, AnyNorm):
            raise NotRecognised("its queries and keys have norms of another kind")
        if isinstance(query, FusedLayerNorm) and query.num_heads is not None:
            return query, key
        sizes = (query.width, key.width)
        if sizes not in ((dim, dim), (num_heads * dim, num_kv_heads * dim)):
            raise NotRecognised(f"the norms of its queries and keys are {sizes[0]} and {sizes[1]} wide")
        return query, key
    return None, None


def _output_gates(weights: AttentionWeights, heads: tuple[int, int, int]) -> Sequence[OutputGate | None]:
    """The gates that the result of attention may have."""
    in_queries = _gates_are_in_queries(weights, heads)
    if weights.gate is None and not in_queries:
        return (None,)
    return [OutputGate(activation, in_queries) for activation in _GATE_ACTIVATIONS]


def _gates_are_in_queries(weights: AttentionWeights, heads: tuple[int, int, int]) -> bool:
    num_outputs = sum(part.out_features for part in weights.projections.values())
    return num_outputs == (2 * heads[0] + 2 * heads[1]) * heads[2]


def _rotation(
    child: nn.Module,
    weights: AttentionWeights,
    norms: tuple[AnyNorm | None, AnyNorm | None],
    bound: float | None,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: AngleLayout,
    expected: Sequence[torch.Tensor],
) -> Rotation | None:
    """What an attention layer does with the queries and keys of x [T, K], to pass `expected` to attention."""
    given = torch.cat([part(x) for part in weights.projections.values()], dim=-1).view(len(x), -1, expected[0].shape[2])
    heads = (expected[0].shape[1], expected[1].shape[1], expected[0].shape[2])
    if _gates_are_in_queries(weights, heads):
        given = torch.cat((given[:, : 2 * heads[0] : 2], given[:, 2 * heads[0] :]), dim=1)
    if bound is not None:
        given = given.clamp(-bound, bound)
    if weights.by_head:
        given = given.view(len(x), heads[0], 3, -1).transpose(1, 2).flatten(1, 2)
    query, key = given[:, : heads[0]], given[:, heads[0] : heads[0] + heads[1]]
    factors = (1.0, *(number for number in vars(child).values() if isinstance(number, float) and number > 0.0))
    kinds = product(_query_scales(child), dict.fromkeys(factors), KINDS, (False, True))
    for scale, factor, kind, norms_last in kinds:
        rotation = Rotation(kind, layout, norms_last, factor, bound, scale)
        of_keys = [rotation.arranged(angles, probe_places(len(x))) for angles in (cos, sin)]
        of_queries = of_keys
        if scale is not None:
            of_keys, of_queries = ([angles.chunk(2, dim=1)[part] for angles in of_keys] for part in range(2))
        width = of_keys[0].shape[1]
        if kind != "none" and width > query.shape[2]:
            continue
        if scale is not None and (kind == "none" or norms_last or width != query.shape[2]):
            continue
        turned = [_turned(query, norms[0], rotation, of_queries), _turned(key, norms[1], rotation, of_keys)]
        if _agree_in_parts(expected[0], turned[0] * factor) and _agree_in_parts(expected[1], turned[1]):
            return rotation
    return None


def _query_scales(child: Any) -> tuple[QueryScale | None, ...]:
    """How queries may be multiplied at each position, by the configuration of a layer."""
    rope = getattr(getattr(child, "config", None), "rope_parameters", None) or {}
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return (None,) if not beta or not length else (None, QueryScale(beta, length))


def _turned(
    rows: torch.Tensor, norm: AnyNorm | None, rotation: Rotation, cos_sin: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Queries or keys [T, H, D] as attention gets them."""
    rows = rows.clone()

    def normed() -> torch.Tensor:
        return rows if norm is None else norm.rows(rows.view(len(rows), -1, norm.width)).view(rows.shape)

    if not rotation.norms_last:
        rows = normed()
    if rotation.kind != "none":
        rotate(rows, cos_sin[0], cos_sin[1], in_pairs=rotation.kind == "pairs")
    return normed() if rotation.norms_last else rows


def _same_attention(
    child: nn.Module, fused: FusedAttention, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> bool:
    """Whether both pass the same rows to attention and compute the same from its result."""
    theirs, expected = echoed(child, x, (cos, sin))
    ours = EchoAttention(fused.rotation.query_factor)
    object.__setattr__(fused, "baton_attend", ours)
    places = probe_places(x.shape[1])
    out = fused.rows(x[0], fused.rotation.arranged(cos[0], places), fused.rotation.arranged(sin[0], places))
    own = fused.own_heads
    seen = (heads_in(rows, heads) for rows, heads in zip(theirs.seen[0], (own.queries, own.kv, own.kv), strict=True))
    pairs = zip(seen, ours.seen[0], strict=True)
    return _agree_in_parts(expected[0], out) and all(_agree_in_parts(theirs, ours) for theirs, ours in pairs)


def _agree_in_parts(expected: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether both the small rows and the large ones of two results agree."""
    same = expected.shape == out.shape
    return same and all(
        agree(*parts) for parts in zip(*(torch.split(rows, NUM_ROWS) for rows in (expected, out)), strict=True)
    )

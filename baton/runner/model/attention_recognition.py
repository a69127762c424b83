"""Finds out what an attention module of transformers does with its rows, by comparing what it passes to attention."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import rms_norm, rotate
from baton.runner.model.attention import AttentionParameters, heads_in
from baton.runner.model.comparison import (
    KINDS,
    LAYOUTS,
    NUM_ROWS,
    SharedKeys,
    agree,
    agree_in_parts,
    echoed,
    factors_of,
    like_input,
    linears_of,
    probe_places,
    random_angles,
    small_and_large_rows,
    takes_shared,
)
from baton.runner.model.fused.attention import GATE_ACTIVATIONS, AttentionWeights, FusedAttention, HeadNorms, OutputGate
from baton.runner.model.fused.low_rank import terms_of, watched_terms
from baton.runner.model.fused.reading_attention import ReadingAttention
from baton.runner.model.fused.rotation import AngleLayout, QueryScale, Rotation
from baton.runner.model.fused.rows import AnyNorm, FusedLayerNorm, FusedNorm
from baton.runner.model.probe_attention import EchoAttention

_LENGTH = 1.25
"""Cosines and sines are so much larger, as those of some models are: otherwise a norm without a weight would give the
same before a rotation and behind it."""
_PROJECTION_NAMES = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("query_key_value",), ("c_attn",))
_KEYS_ARE_VALUES_NAMES = (("q_proj", "k_proj"),)
_QUERY_NAMES = (("q_proj",),)
_OUT_NAMES = (("o_proj",), ("out_proj",), ("dense",), ("c_proj",))
_TAKEN_BY_OTHERS = {"key_value_states", "encoder_hidden_states"}
"""What attention to another text is given."""
_GATE_NAMES = (("gate_proj",), ("g_proj",))
_HEAD_NORM_NAMES = (
    ("q_norm", "k_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
    ("qk_norm", "qk_norm"),
)
"""What models call the parts of attention; what the parts compute is found out."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """What an attention module is called with to find out what it computes."""

    child: Any
    x: torch.Tensor
    """[1, T, K]"""
    cos: torch.Tensor
    """[1, T, R]"""
    sin: torch.Tensor
    layout: AngleLayout
    are_complex: bool
    """Whether the module is given complex numbers that have both."""
    shared: SharedKeys

    def echoed(self) -> tuple[EchoAttention, torch.Tensor]:
        angles = torch.complex(self.cos, self.sin) if self.are_complex else (self.cos, self.sin)
        return echoed(self.child, self.x, angles, self.shared)


_Recognised = tuple[FusedAttention | ReadingAttention | None, str]
"""What computes the same as a module, or why nothing does."""


class NotRecognised(Exception):
    """A module looks like attention, but FusedAttention does not compute the same; the message says what differs."""


class AttentionRecogniser:
    """Recognises the attention modules of one model, which are given to it in the order of its layers."""

    def __init__(self, operations: Operations, widths: Sequence[int], angle_dtypes: set[torch.dtype]) -> None:
        """`widths`: the numbers of angles that a position may have. `angle_dtypes`: of the model's angles."""
        self._operations = operations
        self._widths = widths or [0]
        self._angle_dtypes = angle_dtypes
        self._sources: dict[str, FusedAttention] = {}
        """The latest attention that shares its keys and values under each name."""

    def fused(self, child: Any, generator: torch.Generator) -> FusedAttention | ReadingAttention | None:
        """None for a module that is not attention; raises NotRecognised if neither class computes the same."""
        weights = None if getattr(child, "layer_idx", None) is None else _attention_weights(child)
        if weights is None:
            return None
        first = next(iter(weights.projections.values()))
        x = like_input(first, small_and_large_rows(first.in_features, generator))
        if strange := self._angle_dtypes - {x.dtype, torch.float32, torch.complex64}:
            raise NotRecognised(f"its rotary angles are {strange.pop()}, and its rows {x.dtype}")
        if len(self._angle_dtypes) > 1:
            raise NotRecognised("its rotary angles have several dtypes")
        why, is_called = "it takes no rotary angles", False
        angle_dtype = next(iter(self._angle_dtypes), x.dtype)
        are_complex = angle_dtype == torch.complex64
        angle_dtype = torch.float32 if are_complex else angle_dtype
        for width, layout in product(self._widths, ("half",) if are_complex else LAYOUTS):
            angles = random_angles(width, layout, generator, 2 * NUM_ROWS)
            cos, sin = (_LENGTH * part.to(x.device, angle_dtype) for part in (angles.cos(), angles.sin()))
            probe = _Probe(child, x, cos, sin, layout, are_complex, self._shared(x))
            try:
                with watched_terms(child) as terms:
                    echo, _ = probe.echoed()
            except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
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
            if value.shape[:2] != key.shape[:2] or query.shape[2] != key.shape[2]:
                raise NotRecognised("queries, keys and values have different shapes")
            if weights.out[1].in_features != query.shape[1] * value.shape[2]:
                raise NotRecognised("its last product takes other rows than attention gives")
            if terms and len(weights.projections) == len(("q", "k", "v")):
                weights = weights._replace(terms=terms_of(weights.projections, terms))
            recognise = self._reading if probe.shared.taken else self._whole
            fused, why = recognise(probe, weights, echo)
            if fused is not None:
                return fused
        raise NotRecognised(why)

    def _shared(self, x: torch.Tensor) -> SharedKeys:
        """The keys and values of the layers before that an attention may take for the rows x [1, T, K]."""
        heads = {name: (source.how.num_kv_heads, source.head_dim) for name, source in self._sources.items()}
        return SharedKeys(x.shape[1], x, heads)

    def _whole(self, probe: _Probe, weights: AttentionWeights, echo: EchoAttention) -> _Recognised:
        """The attention that computes what was seen, or why there is none."""
        child, how = probe.child, echo.how
        assert how is not None
        query, key, value = echo.seen[0]
        heads = (query.shape[1], key.shape[1], key.shape[2])
        norms = _head_norms(probe, heads, self._operations)
        if norms.value is not None and norms.value.width != value.shape[2]:
            return None, f"the norm of its values is {norms.value.width} wide"
        if (name := probe.shared.given) is not None:
            self._sources.pop(name, None)  # that of an earlier layer is the wrong one for the layers behind
        why = "no known kind of rotation gives the same result"
        for laid_out, bound in product(_layouts(weights, heads), _bounds(value)):
            rotation = _rotation(probe, laid_out, heads, norms, bound, (query, key))
            if rotation is None:
                continue
            if laid_out.keys_are_values and (rotation.norms_last or norms.query is None or norms.key is None):
                why = "its keys, which are its values, are rotated before a norm has made others of them"
                continue
            rotation = replace(rotation, value_factor=_value_factor(probe, laid_out, norms, bound, value))
            norms_of_attended = _norms_of_attended(child, laid_out.out[1].in_features, norms)
            for gate, attended in product(_output_gates(laid_out, heads), norms_of_attended):
                every = norms._replace(attended=attended)
                fused = FusedAttention(
                    self._operations, child.layer_idx, laid_out, heads, every, how, rotation, gate, name
                )
                if not _same_attention(probe, fused):
                    continue
                if name is not None:
                    self._sources[name] = fused
                return fused, ""
            why = "its result is changed before the last product"
        return None, why

    def _reading(self, probe: _Probe, weights: AttentionWeights, echo: EchoAttention) -> _Recognised:
        """The attention that attends to what another layer has in the cache, or why there is none."""
        child, (name,) = probe.child, probe.shared.taken
        source, query = self._sources[name], echo.seen[0][0]
        heads = (query.shape[1], 0, source.head_dim)
        how, of_source = echo.how, source.how
        assert how is not None
        if not _attend_alike(how, of_source):
            return None, f"it attends otherwise than the layer {source.layer_idx}, whose keys it takes"
        if len(weights.projections) > 1 or weights.gate is not None:
            return None, "it takes keys of another layer and has products of more than queries"
        norms = _head_norms(probe, heads, self._operations)
        rotation = _rotation(probe, weights, heads, norms, None, (query,))
        if rotation is None or rotation.query_scale is not None:
            return None, "no known kind of rotation gives the same result"
        given = next(iter(weights.projections.items()))
        heads = (heads[0], of_source.num_kv_heads, heads[2])
        fused = ReadingAttention(
            self._operations, child.layer_idx, source, given, weights.out, heads, norms.query, rotation
        )
        return (fused, "") if _same_reading(probe, fused) else (None, "its result is changed before the last product")


def _attend_alike(one: AttentionParameters, other: AttentionParameters) -> bool:
    """Whether two layers attend in the same way; False if either has tensors of its own for that."""
    own = {"sinks", "distance_bias"}
    if any(getattr(how, name) is not None for how in (one, other) for name in own):
        return False
    names = (field.name for field in fields(one) if field.name not in own)
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _bounds(value: torch.Tensor) -> list[float | None]:
    """What queries, keys and values may be bounded by: nothing, or what many values of the large rows are."""
    large = value[NUM_ROWS:].float().abs()
    return [None, float(large.max())] if int((large == large.max()).sum()) > 1 else [None]


def _layouts(weights: AttentionWeights, heads: tuple[int, int, int]) -> list[AttentionWeights]:
    """The weights with the orders in which one product may give queries, keys and values."""
    is_of_all = len(weights.projections) == 1 and heads[0] == heads[1]
    if not is_of_all or weights.out[1].in_features != heads[0] * heads[2]:
        return [weights]
    return [weights, weights._replace(by_head=True)]


def _attention_weights(child: Any) -> AttentionWeights | None:
    """None for a module that is not attention; raises NotRecognised for one that takes no angles."""
    out = linears_of(child, _OUT_NAMES)
    projections = linears_of(child, _PROJECTION_NAMES)
    keys_are_values = False
    if projections is None and takes_shared(child) and getattr(child, "v_proj", None) is None:
        projections = linears_of(child, _KEYS_ARE_VALUES_NAMES)
        keys_are_values = projections is not None
        if not hasattr(child, "k_proj"):
            projections = linears_of(child, _QUERY_NAMES)
    if out is None or projections is None:
        return None
    taken = inspect.signature(type(child).forward).parameters
    if _TAKEN_BY_OTHERS & taken.keys() and getattr(child, "is_cross_attention", True):
        raise NotRecognised("it takes other arguments than rows and rotary angles")
    gate = next(iter((linears_of(child, _GATE_NAMES) or {}).items()), None)
    return AttentionWeights(projections, next(iter(out.items())), gate, keys_are_values=keys_are_values)


def _head_norms(probe: _Probe, heads: tuple[int, int, int], operations: Operations) -> HeadNorms:
    """The norms of queries, keys and values, of each head or of all together; KH is 0 for a layer without keys.

    Raises NotRecognised for others.
    """
    child, (num_heads, num_kv_heads, dim) = probe.child, heads

    def norm_of_head(name: str) -> AnyNorm | None:
        norm = getattr(child, name, None)
        return norm if isinstance(norm, AnyNorm) else norm_without_weight(norm, dim, probe.x, operations)

    value = norm_of_head("v_norm") if num_kv_heads else None
    if value is None and num_kv_heads and getattr(child, "v_norm", None) is not None:
        raise NotRecognised("its values have a norm of another kind")
    for names in _HEAD_NORM_NAMES:
        if all(getattr(child, name, None) is None for name in names):
            continue
        query, key = (norm_of_head(name) for name in names)
        if num_kv_heads == 0 and key is None and isinstance(query, FusedNorm) and query.width == dim:
            return HeadNorms(query)
        if query is None or key is None:
            raise NotRecognised("its queries and keys have norms of another kind")
        if isinstance(query, FusedLayerNorm) and query.num_heads is not None:
            return HeadNorms(query, key)
        sizes = (query.width, key.width)
        if sizes not in ((dim, dim), (num_heads * dim, num_kv_heads * dim)):
            raise NotRecognised(f"the norms of its queries and keys are {sizes[0]} and {sizes[1]} wide")
        return HeadNorms(query, key, value)
    return HeadNorms(value=value)


def norm_without_weight(norm: Any, width: int, like: torch.Tensor, operations: Operations) -> FusedNorm | None:
    """A norm with ones for its weight that computes the same of rows of this width; None for other modules.

    `like`: in the dtype and on the device of the rows.
    """
    eps = getattr(norm, "eps", None)
    if not isinstance(norm, nn.Module) or isinstance(norm, AnyNorm) or not eps:
        return None
    if [*norm.parameters(), *norm.buffers(), *norm.children()]:
        return None
    ones = like.new_ones(width)
    rows = torch.randn(NUM_ROWS, width, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).to(ones)
    # Small rows show where the epsilon is added.
    rows = rows * torch.logspace(-3, 1, NUM_ROWS, dtype=torch.float32)[:, None].to(ones)
    try:
        expected = norm(rows)
    except (RuntimeError, TypeError, ValueError):
        return None  # it takes more than rows
    is_same = all(agree(*pair) for pair in zip(expected, rms_norm(rows, ones, eps, plus_one=False), strict=True))
    return FusedNorm(operations, ones, eps, plus_one=False) if is_same else None


def _norms_of_attended(child: Any, width: int, norms: HeadNorms) -> list[AnyNorm | None]:
    """The norms that the result of attention may have before the last product."""
    others = (part for part in child.children() if isinstance(part, AnyNorm) and all(part is not one for one in norms))
    return [None, *(norm for norm in others if norm.width == width)]


def _output_gates(weights: AttentionWeights, heads: tuple[int, int, int]) -> Sequence[OutputGate | None]:
    """The gates that the result of attention may have."""
    in_queries = _gates_are_in_queries(weights, heads)
    if weights.gate is None and not in_queries:
        return (None,)
    return [OutputGate(activation, in_queries) for activation in GATE_ACTIVATIONS]


def _gates_are_in_queries(weights: AttentionWeights, heads: tuple[int, int, int]) -> bool:
    num_outputs = sum(part.out_features for part in weights.projections.values())
    return num_outputs == (2 * heads[0] + heads[1]) * heads[2] + _width_of_values(weights, heads)


def _width_of_values(weights: AttentionWeights, heads: tuple[int, int, int]) -> int:
    """The width of the values of all heads."""
    return heads[1] * (weights.out[1].in_features // heads[0])


def _value_factor(
    probe: _Probe, weights: AttentionWeights, norms: HeadNorms, bound: float | None, expected: torch.Tensor
) -> float:
    """What an attention layer multiplies values with, to pass `expected` to attention. 1.0 if no factor does that."""
    if weights.keys_are_values or weights.by_head or norms.value is not None:
        return 1.0
    given = weights.outputs(probe.x[0])[-1]
    values = given[:, -expected.shape[1] * expected.shape[2] :].view(expected.shape)
    if bound is not None:
        values = values.clamp(-bound, bound)
    factors = factors_of(probe.child)
    return next((factor for factor in factors if agree_in_parts(expected, values * factor)), 1.0)


def _rotation(
    probe: _Probe,
    weights: AttentionWeights,
    heads: tuple[int, int, int],
    norms: HeadNorms,
    bound: float | None,
    expected: Sequence[torch.Tensor],
) -> Rotation | None:
    """What an attention layer does with the queries and keys of x [T, K], to pass `expected` to attention.

    `expected`: of a layer without keys its queries alone, and `heads` has KH 0.
    """
    child, x = probe.child, probe.x[0]
    given = torch.cat(weights.outputs(x), dim=-1)
    if not weights.by_head and not weights.keys_are_values:
        given = given[:, : given.shape[1] - _width_of_values(weights, heads)]
    given = given.reshape(len(x), -1, heads[2])
    if _gates_are_in_queries(weights, heads):
        given = torch.cat((given[:, : 2 * heads[0] : 2], given[:, 2 * heads[0] :]), dim=1)
    if bound is not None:
        given = given.clamp(-bound, bound)
    if weights.by_head:
        given = given.view(len(x), heads[0], 3, -1).transpose(1, 2).flatten(1, 2)
    rows = (given[:, : heads[0]], given[:, heads[0] : heads[0] + heads[1]])
    # Layers that share keys take them as they are in the cache.
    key_factors = factors_of(child) if probe.shared.given is None else [1.0]
    kinds = product((False, True), _query_scales(child), factors_of(child), KINDS, (False, True))
    for is_backwards, scale, factor, kind, norms_last in kinds:
        rotation = Rotation(kind, probe.layout, norms_last, factor, bound, scale, is_backwards)
        of_keys: Sequence[torch.Tensor] = rotation.arranged(probe.cos[0], probe.sin[0], probe_places(len(x)))
        of_queries = of_keys
        if scale is not None:
            of_keys, of_queries = ([angles.chunk(2, dim=1)[part] for angles in of_keys] for part in range(2))
        width = of_keys[0].shape[1]
        if kind != "none" and width > heads[2]:
            continue
        if scale is not None and (norms_last or width != heads[2]):
            continue
        # A layer that rotates nothing doesn't show how its angles are laid out, and complex ones are in one way.
        if rotation.is_scale_alone and not probe.are_complex:
            continue
        if not agree_in_parts(expected[0], _turned(rows[0], norms.query, rotation, of_queries) * factor):
            continue
        if len(expected) == 1:
            return rotation
        key = _turned(rows[1], norms.key, rotation, of_keys)
        for of_key in key_factors:
            if agree_in_parts(expected[1], key * of_key):
                return replace(rotation, key_factor=of_key)
    return None


def _query_scales(child: Any) -> tuple[QueryScale | None, ...]:
    """How queries may be multiplied at each position, by the configuration of a layer."""
    rope = getattr(getattr(child, "config", None), "rope_parameters", None) or {}
    of_rope = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings"), 0
    own = getattr(child, "attn_scale", None), getattr(child, "floor_scale", None), 1
    known = [QueryScale(beta, length, first) for beta, length, first in (of_rope, own) if beta and length]
    return None, *known


def _turned(
    rows: torch.Tensor, norm: AnyNorm | None, rotation: Rotation, cos_sin: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Queries or keys [T, H, D] as attention gets them."""
    rows = rows.clone()

    def normed() -> torch.Tensor:
        return rows if norm is None else norm.rows(rows.view(len(rows), -1, norm.width)).view(rows.shape)

    if not rotation.norms_last:
        rows = normed()
    if rotation.takes_angles:
        rotate(rows, cos_sin[0], cos_sin[1], in_pairs=rotation.kind == "pairs")
    return normed() if rotation.norms_last else rows


def _same_attention(probe: _Probe, fused: FusedAttention) -> bool:
    """Whether both pass the same rows to attention and compute the same from its result."""
    theirs, expected = probe.echoed()
    ours, out = _echo_of(probe, fused)
    own = fused.own_heads
    seen = (heads_in(rows, heads) for rows, heads in zip(theirs.seen[0], (own.queries, own.kv, own.kv), strict=True))
    pairs = zip(seen, ours.seen[0], strict=True)
    return agree_in_parts(expected[0], out) and all(agree_in_parts(theirs, ours) for theirs, ours in pairs)


def _same_reading(probe: _Probe, fused: ReadingAttention) -> bool:
    """Whether both attend with the same queries and compute the same from its result."""
    theirs, expected = probe.echoed()
    query, key, value = theirs.seen[0]
    own = fused.own_heads
    with fused.source.sharing(heads_in(key, own.kv), heads_in(value, own.kv)):
        ours, out = _echo_of(probe, fused)
    same_queries = agree_in_parts(heads_in(query, own.queries), ours.seen[0][0])
    return same_queries and agree_in_parts(expected[0], out)


def _echo_of(probe: _Probe, fused: FusedAttention | ReadingAttention) -> tuple[EchoAttention, torch.Tensor]:
    """What a fused module passes to attention, and what it computes of the echo."""
    echo = EchoAttention(fused.rotation.query_factor, fused.rotation.key_factor)
    object.__setattr__(fused, "baton_attend", echo)
    places = probe_places(probe.x.shape[1])
    cos, sin = fused.rotation.arranged(probe.cos[0], probe.sin[0], places)
    return echo, fused.rows(probe.x[0], cos, sin)

"""Finds the parts of a transformers model that Baton's fused layers can compute, by comparing what they compute.

A candidate has the children that such a part has. A fused layer is built from them, both compute the same random input,
and the fused layer replaces the part only if they agree within rounding. A part that does not agree stays, and its
products are replaced one by one (layers.py). Class names play no role.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import activate, rms_norm, rotate
from baton.runner.model.attention import EchoAttention, heads_in
from baton.runner.model.fused_layers import (
    AngleLayout,
    Angles,
    AnyNorm,
    AttentionWeights,
    FusedActivation,
    FusedAttention,
    FusedLayerNorm,
    FusedMlp,
    FusedNorm,
    OutputGate,
    PlainMlp,
    QueryScale,
    Rotation,
)
from baton.runner.model.states.layer_functions import keep_states_in_cache
from baton.runner.model.states.mixers import StateMixer, state_mixer_of
from baton.runner.model.stored.layers import (
    StoredLinear,
    forget_weights,
    halves_of,
    weight_of,
)

NUM_ROWS = 5
"""So many rows are compared."""
_LARGE = 1000.0
"""Attention is compared for as many rows that are so much larger, too, since some of its numbers may be bounded."""
_EPSILONS = (1e-5, 1e-6)
"""What norms may add to the variance that don't say what they add."""
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu", "relu", "relu_squared")
_GATE_ACTIVATIONS: tuple[Literal["sigmoid", "softplus"], ...] = ("sigmoid", "softplus")
LAYOUTS: tuple[AngleLayout, ...] = ("halves", "half", "pairs")
KINDS: tuple[Literal["halves", "pairs", "none"], ...] = ("halves", "pairs", "none")
_MLP_NAMES = (
    ("gate_up_proj", "down_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("input_linear", "output_linear"),
)
"""What models call the linear layers of a gated MLP: of gate and up, and the last one."""
_PLAIN_MLP_NAMES = (("up_proj", "down_proj"), ("c_fc", "c_proj"), ("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h"))
"""The same of an MLP without a gate."""
_OF_LAYER_NORMS = ({"weight"}, {"weight", "bias"})
_PROJECTION_NAMES = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("query_key_value",), ("c_attn",))
_OUT_NAMES = (("o_proj",), ("out_proj",), ("dense",), ("c_proj",))
_TAKEN_BY_OTHERS = {"key_value_states", "encoder_hidden_states"}
"""What attention to another text is given."""
_GATE_NAMES = (("gate_proj",), ("g_proj",))
_HEAD_NORM_NAMES = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))
"""What models call the parts of attention; what the parts compute is found out."""
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2}
"""The largest difference, as a share of the largest number, that another order of rounding explains."""

Release = Callable[[nn.Module], None]


def fuse(module: nn.Module, operations: Operations, row_quantum: int, release: Release) -> str:
    """Replace recognised parts in place; `release` is called with every module that was replaced. `row_quantum`: torch
    computes multiples of this many rows.

    Returns why the last attention module that was not recognised was not; empty when all of them were.
    """
    why_not = ""
    generator = torch.Generator().manual_seed(0)
    widths = angle_widths(module)
    with torch.inference_mode():
        _use_linear_layers(module)
        like = _like_weights(module)
        angle_dtypes = angle_dtypes_of(module)
        for parent, name, child in children_of(module):
            norm = _fused_norm(child, operations, generator) or _fused_layer_norm(child, operations, generator, like)
            if norm is not None:
                setattr(parent, name, norm)
        for parent, name, child in children_of(module):
            try:
                fused = (
                    _fused_mlp(child, operations, generator)
                    or _plain_mlp(child, operations, generator, row_quantum)
                    or _state_mixer(child, operations, generator)
                    or _fused_attention(child, operations, generator, widths, angle_dtypes)
                )
            except _NotRecognised as reason:
                why_not = f"{type(child).__name__}: {reason}"
                forget_weights(child)
                continue
            if fused is None:
                forget_weights(child)
                continue
            setattr(parent, name, fused)
            release(child)
        _fuse_activations(module, operations)
    return why_not


def _like_weights(module: nn.Module) -> torch.Tensor:
    """No numbers, in the dtype and on the device of the weights of products."""
    for part in module.modules():
        if isinstance(part, StoredLinear):
            return torch.empty(0, dtype=part.dtype, device=part.device)
        if isinstance(part, nn.Linear):
            return part.weight.detach().new_empty(0)
    return torch.empty(0, dtype=torch.float32)


def _use_linear_layers(module: nn.Module) -> None:
    """Put linear layers in the place of those that keep their weights transposed, which compute the same."""
    from transformers.pytorch_utils import Conv1D

    for parent, name, child in children_of(module):
        if isinstance(child, Conv1D):
            linear = nn.Linear(1, 1, bias=False, device="meta")
            linear.weight, linear.bias = nn.Parameter(child.weight.detach().T, requires_grad=False), child.bias
            linear.out_features, linear.in_features = linear.weight.shape
            setattr(parent, name, linear)


def _fuse_activations(module: nn.Module, operations: Operations) -> None:
    """Replace the activations that layers apply themselves, whose MLP is no part of its own."""
    for parent, name, child in children_of(module):
        is_of_layer = any(isinstance(part, FusedAttention) for part in parent.children())
        if is_of_layer and child is _activation_function(parent) and (activation := _activation_of(parent)):
            setattr(parent, name, FusedActivation(operations, activation))


def gated_activation(apply_gate: Callable[[torch.Tensor], torch.Tensor]) -> Activation | None:
    """The activation `act` if `apply_gate` computes act(first half) * second half from [T, 2 N]; otherwise None."""
    x = torch.randn(16, 64, dtype=torch.float32, generator=torch.Generator().manual_seed(0)) * 3
    gate, up = x.chunk(2, dim=-1)
    out = apply_gate(x)
    return next((name for name in _ACTIVATIONS if torch.allclose(out, activate(gate, name) * up, atol=1e-5)), None)


class _NotRecognised(Exception):
    """A module looks like attention, but FusedAttention does not compute the same; the message says what differs."""


def children_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every parent module in `module`, with each child and its name. The caller may replace children meanwhile.

    Parents are remembered by their paths, since a list of modules would keep replaced modules and their weights.
    """
    for path in [path for path, _ in module.named_modules()]:
        try:
            parent = module.get_submodule(path)
        except AttributeError:
            continue  # a part above this module was replaced
        for name in [name for name, _ in parent.named_children()]:
            yield parent, name, parent.get_submodule(name)


def _fused_norm(child: nn.Module, operations: Operations, generator: torch.Generator) -> FusedNorm | None:
    if isinstance(child, nn.Linear):
        return None  # one that is in its file would be read by the next line
    weight = getattr(child, "weight", None)
    eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
    if list(child.children()) or not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not eps:
        return None
    if len(list(child.parameters(recurse=False))) != 1 or _num_arguments(child) != 1:
        return None  # one with a gate takes more than rows, and may do without it
    # Small, medium and large rows: the small ones show where eps is added.
    x = (
        torch.randn(NUM_ROWS, weight.shape[0], dtype=torch.float32, generator=generator)
        * torch.tensor([1e-3, 1e-2, 1.0, 3.0, 50.0])[:, None]
    )
    x = x.to(weight.device)
    try:
        out = copy.deepcopy(child).float()(x)
    except (TypeError, AttributeError):
        return None
    for plus_one in (False, True):
        if agree(out, rms_norm(x, weight.float(), eps, plus_one)):
            return FusedNorm(operations, weight, eps, plus_one)
    return None


def _num_arguments(child: nn.Module) -> int:
    """How many arguments a part can be given by position."""
    taken = inspect.signature(child.forward).parameters.values()
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in taken)


def _fused_layer_norm(
    child: Any, operations: Operations, generator: torch.Generator, like: torch.Tensor
) -> FusedLayerNorm | None:
    """`like`: in the dtype and on the device of the weights that a norm without any has."""
    names = {name for name, _ in child.named_parameters()}
    eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
    shape = getattr(child, "normalized_shape", None)
    if isinstance(child, nn.Linear) or list(child.children()):
        return None
    if not names and isinstance(shape, tuple) and len(shape) == 1:
        weight, bias = like.new_ones(shape), None
    elif eps and names in _OF_LAYER_NORMS:
        weight, bias = child.get_parameter("weight").detach(), getattr(child, "bias", None)
    else:
        return None
    if weight.dim() > 2 or (bias is not None and bias.shape != weight.shape):
        return None
    rows = torch.randn(*weight.shape[:-1], NUM_ROWS, weight.shape[-1], dtype=torch.float32, generator=generator)
    rows = rows * torch.tensor([1e-3, 1e-2, 1.0, 3.0, 50.0])[:, None] + torch.arange(NUM_ROWS)[:, None]
    x = rows.transpose(0, -2).to(weight).contiguous()
    try:
        expected = child(x)
    except (TypeError, AttributeError):
        return None  # one with a gate takes more than rows
    kinds = product((weight, weight + 1) if names else (weight,), (eps,) if eps else _EPSILONS)
    fused = (FusedLayerNorm(operations, factor, bias, added) for factor, added in kinds)
    return next((norm for norm in fused if agree(expected, norm(x))), None)


def _plain_mlp(child: Any, operations: Operations, generator: torch.Generator, row_quantum: int) -> PlainMlp | None:
    linear, activation = _linears(child, _PLAIN_MLP_NAMES), _activation_function(child)
    if linear is None or activation is None:
        return None
    others = [part for name, part in child.named_children() if name not in linear and part is not activation]
    if not all(isinstance(part, nn.Dropout) for part in others):
        return None  # a whole layer, which takes more than rows
    up, down = linear.values()
    x = like_input(up, torch.randn(1, NUM_ROWS, up.in_features, dtype=torch.float32, generator=generator))
    if not agree(child(x), down(activation(up(x)))):
        return None
    known = next((name for name in _ACTIVATIONS if _computes(activation, name)), None)
    return PlainMlp(operations, up, down, known or activation, [*linear], row_quantum)


def _fused_mlp(child: Any, operations: Operations, generator: torch.Generator) -> FusedMlp | None:
    linear = _linears(child, _MLP_NAMES)
    if linear is None:
        return None
    *gate_and_up, down = linear.values()
    if any(part.bias is not None for part in gate_and_up):
        return None
    activation = _activation_of(child)
    if activation is None:
        return None
    weights = [weight_of(part) for part in gate_and_up]
    gate, up = weights if len(weights) == 2 else halves_of(weights[0])
    x = like_input(down, torch.randn(1, NUM_ROWS, gate.shape[1], dtype=torch.float32, generator=generator))
    fused = FusedMlp(operations, gate, up, weight_of(down), down.bias, activation, [*linear])
    try:
        expected = child(x)
    except (KeyError, TypeError):  # it asks for more than rows: zamba2's for the number of its layer
        return None
    return fused if agree(expected, fused(x)) else None


def _state_mixer(child: Any, operations: Operations, generator: torch.Generator) -> StateMixer | None:
    fused = state_mixer_of(child, operations)
    if fused is None:
        return None
    keep_states_in_cache(child)
    first = fused.products[0]
    rows = torch.randn(1, NUM_ROWS, first.num_inputs, dtype=torch.float32, generator=generator)
    x = like_input(child.get_submodule(first.modules[0].module), rows)
    theirs, ours = EchoAttention(), EchoAttention()
    for part, echo in ((child, theirs), (fused, ours)):
        object.__setattr__(part, "baton_attend", echo)
    try:
        is_same = agree(child(x), fused(x)) and len(theirs.states.seen) == len(ours.states.seen)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None  # its parts have the names of this mixer's and do something else
    if not is_same:
        return None
    # Some of it is float32, and made of rounded rows all the same.
    alike = all(
        len(asked) == len(own) and all(agree(a.to(x.dtype), b.to(x.dtype)) for a, b in zip(asked, own, strict=True))
        for asked, own in zip(theirs.states.seen, ours.states.seen, strict=True)
    )
    return fused if alike else None


def like_input(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Input x in the dtype and on the device of a layer's weight, which is not read for that."""
    return x.to(linear.device, linear.dtype) if isinstance(linear, StoredLinear) else x.to(linear.weight)


def _activation_of(child: Any) -> Activation | None:
    """The activation that a part has, if it is a known one; of a part that has none the most common."""
    function = _activation_function(child) or functional.silu
    return next((name for name in _ACTIVATIONS if _computes(function, name)), None)


def _computes(function: Callable[[torch.Tensor], torch.Tensor], activation: Activation) -> bool:
    # The dtype is named, since another thread that loads a model changes the default.
    x = torch.linspace(-9, 9, 256, dtype=torch.float32)
    return torch.allclose(function(x), activate(x, activation), atol=1e-6)


def _activation_function(child: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    names = ("act_fn", "activation_fn", "activation", "act")
    return next((part for name in names if callable(part := getattr(child, name, None))), None)


def _fused_attention(
    child: Any,
    operations: Operations,
    generator: torch.Generator,
    widths: list[int],
    angle_dtypes: set[torch.dtype],
) -> FusedAttention | None:
    """None for a module that is not attention; raises _NotRecognised if FusedAttention does not compute the same."""
    weights = None if getattr(child, "layer_idx", None) is None else _attention_weights(child)
    if weights is None:
        return None
    first = next(iter(weights.projections.values()))
    rows = torch.randn(1, 2 * NUM_ROWS, first.in_features, dtype=torch.float32, generator=generator)
    rows[:, NUM_ROWS:] *= _LARGE
    x = like_input(first, rows)
    if strange := angle_dtypes - {x.dtype, torch.float32}:
        raise _NotRecognised(f"its rotary angles are {strange.pop()}, and its rows {x.dtype}")
    if len(angle_dtypes) > 1:
        raise _NotRecognised("its rotary angles have several dtypes")
    why, is_called = "it takes no rotary angles", False
    angle_dtype = next(iter(angle_dtypes), x.dtype)
    for width, layout in product(widths or [0], LAYOUTS):
        angles = random_angles(width, layout, generator, 2 * NUM_ROWS)
        cos, sin = (part.to(x.device, angle_dtype) for part in (angles.cos(), angles.sin()))
        try:
            echo, _ = echoed(child, x, (cos, sin))
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            # It takes angles of another width, or other arguments.
            why = why if is_called else f"called with {width} angles it raised {type(error).__name__}: {error}"
            continue
        if echo.how is None:
            why = "it does not call attention through transformers' AttentionInterface"
            continue
        if len(echo.seen) > 1:
            raise _NotRecognised(f"it calls attention {len(echo.seen)} times")
        is_called = True
        query, key, value = echo.seen[0]
        heads = (query.shape[1], key.shape[1], key.shape[2])
        if value.shape != key.shape or query.shape[2] != key.shape[2]:
            raise _NotRecognised("keys and values have different shapes")
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
    raise _NotRecognised(why)


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
    """None for a module that is not attention; raises _NotRecognised for one that takes no angles."""
    out = _linears(child, _OUT_NAMES)
    projections = _linears(child, _PROJECTION_NAMES)
    if out is None or projections is None:
        return None
    taken = inspect.signature(type(child).forward).parameters
    if _TAKEN_BY_OTHERS & taken.keys() and getattr(child, "is_cross_attention", True):
        raise _NotRecognised("it takes other arguments than rows and rotary angles")
    gate = next(iter((_linears(child, _GATE_NAMES) or {}).items()), None)
    return AttentionWeights(projections, next(iter(out.items())), gate)


def _linears(child: Any, known_names: Sequence[Sequence[str]]) -> dict[str, nn.Linear] | None:
    """The linear layers of a part that have names which are known together."""
    for names in known_names:
        found = {name: getattr(child, name, None) for name in names}
        if all(isinstance(part, nn.Linear) for part in found.values()):
            return found  # type: ignore[return-value]
    return None


def random_angles(
    width: int, layout: AngleLayout, generator: torch.Generator, num_rows: int = NUM_ROWS
) -> torch.Tensor:
    """Random angles [1, num_rows, width] in a layout of real models."""
    few = width if layout == "half" else width // 2
    angles = torch.rand(1, num_rows, few, dtype=torch.float32, generator=generator) * 6
    if layout == "pairs":
        return angles.repeat_interleave(2, dim=-1)
    return angles if layout == "half" else torch.cat((angles, angles), dim=-1)


def echoed(child: nn.Module, x: torch.Tensor, given: Angles) -> tuple[EchoAttention, torch.Tensor]:
    """What a module passes to attention for the rows x [1, T, K], and what it computes of the echo."""
    echo = EchoAttention()
    object.__setattr__(child, "baton_attend", echo)
    # Layers without any rotation hand on to attention what they don't know.
    takes_angles = "position_embeddings" in inspect.signature(type(child).forward).parameters
    angles: dict[str, Any] = {"position_embeddings": given} if takes_angles else {}
    if "position_ids" in inspect.signature(type(child).forward).parameters:
        angles["position_ids"] = _places(x.shape[1]).to(x.device)[None]
    return echo, child(hidden_states=x, attention_mask=None, **angles)[0]


def _head_norms(child: Any, heads: tuple[int, int, int]) -> tuple[AnyNorm | None, AnyNorm | None]:
    """The norms of queries and keys, of each head or of all together. Raises _NotRecognised for others."""
    num_heads, num_kv_heads, dim = heads
    for names in _HEAD_NORM_NAMES:
        query, key = (getattr(child, name, None) for name in names)
        if query is None and key is None:
            continue
        if not isinstance(query, AnyNorm) or not isinstance(key, AnyNorm):
            raise _NotRecognised("its queries and keys have norms of another kind")
        if isinstance(query, FusedLayerNorm) and query.num_heads is not None:
            return query, key
        sizes = (query.width, key.width)
        if sizes not in ((dim, dim), (num_heads * dim, num_kv_heads * dim)):
            raise _NotRecognised(f"the norms of its queries and keys are {sizes[0]} and {sizes[1]} wide")
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
        of_keys = [rotation.arranged(angles, _places(len(x))) for angles in (cos, sin)]
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


def _places(num_rows: int) -> torch.Tensor:
    """The positions of compared rows, int64 [num_rows], some of them behind the lengths of most models' training."""
    return torch.arange(num_rows) * 8000


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
    places = _places(x.shape[1])
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


def agree(expected: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether two results of one dtype differ by no more than another order of rounding explains."""
    if expected.shape != out.shape or expected.dtype != out.dtype:
        return False
    difference = (expected.float() - out.float()).abs().max()
    return bool(difference <= _TOLERANCE[expected.dtype] * expected.float().abs().max())


def angle_widths(module: nn.Module) -> list[int]:
    """The numbers of angles that a position may have: two for each inverse frequency, or one."""
    sizes = {buffer.numel() for name, buffer in module.named_buffers() if name.endswith("inv_freq")}
    return [2 * size for size in sorted(sizes)] + sorted(sizes)


def angle_dtypes_of(module: nn.Module) -> set[torch.dtype]:
    """The dtypes of the cosines and sines that rotary modules give for rows in the dtype of the weights."""
    like = torch.zeros(1, 1, 1, dtype=next((p.dtype for p in module.parameters() if p.is_floating_point()), None))
    dtypes = set()
    for rotary in module.modules():
        if not any(name.endswith("inv_freq") for name, _ in rotary.named_buffers(recurse=False)):
            continue
        device = next(rotary.buffers()).device
        try:
            angles = rotary(like.to(device), torch.zeros(1, 1, dtype=torch.int64, device=device))
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            continue  # It takes other arguments, so its angles are not known before a step.
        dtypes |= {part.dtype for part in angles}
    return dtypes

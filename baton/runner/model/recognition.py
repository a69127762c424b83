"""Finds the parts of a transformers model that Baton's fused layers can compute, by comparing what they compute.

A candidate has the children that such a part has. A fused layer is built from them, both compute the same random input,
and the fused layer replaces the part only if they agree within rounding. A part that does not agree stays, and its
products are replaced one by one (layers.py). Class names play no role.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from baton.runner.backends.operations import Activation, Operations
from baton.runner.backends.torch_operations import activate, rms_norm
from baton.runner.backends.weight_rows import Weight
from baton.runner.model.attention import AttentionParameters, EchoAttention, heads_in
from baton.runner.model.fused_layers import FusedAttention, FusedMlp, FusedNorm, whole_angles
from baton.runner.model.stored.layers import (
    StoredLinear,
    forget_weights,
    halves_of,
    weight_of,
)

_ROWS = 5
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu")
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2}
"""The largest difference, as a share of the largest number, that another order of rounding explains."""

Release = Callable[[nn.Module], None]


def fuse(module: nn.Module, operations: Operations, release: Release) -> str:
    """Replace recognised parts in place; `release` is called with every module that was replaced.

    Returns why the last attention module that was not recognised was not; empty when all of them were.
    """
    why_not = ""
    generator = torch.Generator().manual_seed(0)
    widths = _angle_widths(module)
    with torch.inference_mode():
        angle_dtypes = _angle_dtypes(module)
        for parent, name, child in children_of(module):
            norm = _fused_norm(child, operations, generator)
            if norm is not None:
                setattr(parent, name, norm)
        for parent, name, child in children_of(module):
            try:
                fused = _fused_mlp(child, operations, generator) or _fused_attention(
                    child, operations, generator, widths, angle_dtypes
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
    return why_not


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
    if len(list(child.parameters(recurse=False))) != 1:
        return None
    # Small, medium and large rows: the small ones show where eps is added.
    x = (
        torch.randn(_ROWS, weight.shape[0], dtype=torch.float32, generator=generator)
        * torch.tensor([1e-3, 1e-2, 1.0, 3.0, 50.0])[:, None]
    )
    x = x.to(weight.device)
    try:
        out = copy.deepcopy(child).float()(x)
    except (TypeError, AttributeError):
        return None  # one with a gate takes more than rows
    for plus_one in (False, True):
        if _agree(out, rms_norm(x, weight.float(), eps, plus_one)):
            return FusedNorm(operations, weight, eps, plus_one)
    return None


def _fused_mlp(child: Any, operations: Operations, generator: torch.Generator) -> FusedMlp | None:
    down, act = getattr(child, "down_proj", None), getattr(child, "act_fn", getattr(child, "activation_fn", None))
    if not isinstance(down, nn.Linear) or not callable(act):
        return None
    activation = _activation(act)
    gate_and_up = _gate_and_up(child)
    if activation is None or gate_and_up is None:
        return None
    x = _like_input(down, torch.randn(1, _ROWS, gate_and_up[0].shape[1], dtype=torch.float32, generator=generator))
    in_one = isinstance(getattr(child, "gate_up_proj", None), nn.Linear)
    fused = FusedMlp(operations, *gate_and_up, weight_of(down), down.bias, activation, in_one)
    return fused if _agree(child(x), fused(x)) else None


def _like_input(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Input x in the dtype and on the device of a layer's weight, which is not read for that."""
    return x.to(linear.device, linear.dtype) if isinstance(linear, StoredLinear) else x.to(linear.weight)


def _activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Activation | None:
    x = torch.linspace(-9, 9, 256)
    return next((name for name in _ACTIVATIONS if torch.allclose(function(x), activate(x, name), atol=1e-6)), None)


def _gate_and_up(child: Any) -> tuple[Weight, Weight] | None:
    gate, up, both = (getattr(child, name, None) for name in ("gate_proj", "up_proj", "gate_up_proj"))
    if isinstance(both, nn.Linear) and both.bias is None:
        return halves_of(weight_of(both))
    if not isinstance(gate, nn.Linear) or not isinstance(up, nn.Linear):
        return None
    return (weight_of(gate), weight_of(up)) if gate.bias is None and up.bias is None else None


def _fused_attention(
    child: Any,
    operations: Operations,
    generator: torch.Generator,
    widths: list[int],
    angle_dtypes: set[torch.dtype],
) -> FusedAttention | None:
    """None for a module that is not attention; raises _NotRecognised if FusedAttention does not compute the same."""
    projections = _projections(child)
    if projections is None or getattr(child, "layer_idx", None) is None:
        return None
    why = "it takes no rotary angles"
    first = projections[0]
    x = _like_input(first, torch.randn(1, _ROWS, first.in_features, dtype=torch.float32, generator=generator))
    if strange := angle_dtypes - {x.dtype}:
        # OLMo keeps its angles in float32, and rounds only the rotated rows.
        raise _NotRecognised(f"its rotary angles are {strange.pop()}, and its rows {x.dtype}")
    for width in widths:
        angles = torch.rand(1, _ROWS, width, dtype=torch.float32, generator=generator) * 6
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        echo = EchoAttention()
        object.__setattr__(child, "baton_attend", echo)
        try:
            child(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            # It takes angles of another width, or other arguments.
            why = f"called with {width} angles it raised {type(error).__name__}: {error}"
            continue
        if echo.how is None:
            why = "it does not call attention through transformers' AttentionInterface"
            continue
        if len(echo.seen) > 1:
            raise _NotRecognised(f"it calls attention {len(echo.seen)} times")
        query, key, value = echo.seen[0]
        heads = (query.shape[1], key.shape[1], key.shape[2])
        if value.shape != key.shape or query.shape[2] != key.shape[2]:
            raise _NotRecognised("keys and values have different shapes")
        for half in (False, True):
            # Cosines and sines of real models are equal in both halves.
            halves = width if half else width // 2
            angles = torch.cat(
                [torch.rand(1, _ROWS, halves, dtype=torch.float32, generator=generator) * 6] * (1 if half else 2),
                dim=-1,
            )
            cos, sin = angles.cos().to(x), angles.sin().to(x)
            if half and 2 * width > heads[2]:
                continue
            fused = _build_attention(child, projections, operations, heads, echo.how, half)
            if fused is not None and _same_attention(child, fused, x, cos, sin):
                return fused
        why = "no known kind of rotation gives the same result"
    raise _NotRecognised(why)


def _projections(child: Any) -> tuple[nn.Linear, ...] | None:
    if not isinstance(getattr(child, "o_proj", None), nn.Linear):
        return None
    for names in (("q_proj", "k_proj", "v_proj"), ("qkv_proj",)):
        projections = tuple(getattr(child, name, None) for name in names)
        if all(isinstance(part, nn.Linear) for part in projections):
            return projections  # type: ignore[return-value]
    return None


def _build_attention(
    child: Any,
    projections: tuple[nn.Linear, ...],
    operations: Operations,
    heads: tuple[int, int, int],
    how: AttentionParameters,
    half_angles: bool,
) -> FusedAttention | None:
    norms = (getattr(child, "q_norm", None), getattr(child, "k_norm", None))
    for norm in norms:
        if norm is not None and not (isinstance(norm, FusedNorm) and norm.rms_weight.shape[0] == heads[2]):
            return None
    return FusedAttention(
        operations,
        child.layer_idx,
        tuple(weight_of(part) for part in projections),
        tuple(part.bias for part in projections),
        (weight_of(child.o_proj), child.o_proj.bias),
        heads,
        norms,
        how,
        half_angles,
    )


def _same_attention(
    child: nn.Module, fused: FusedAttention, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> bool:
    """Whether both pass the same rows to attention and compute the same from its result."""
    theirs, ours = EchoAttention(), EchoAttention()
    object.__setattr__(child, "baton_attend", theirs)
    object.__setattr__(fused, "baton_attend", ours)
    expected = child(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)[0]
    out = fused.rows(x[0], whole_angles(cos[0], fused.half_angles), whole_angles(sin[0], fused.half_angles))
    own = fused.own_heads
    seen = (heads_in(rows, heads) for rows, heads in zip(theirs.seen[0], (own.queries, own.kv, own.kv), strict=True))
    pairs = zip(seen, ours.seen[0], strict=True)
    return _agree(expected[0], out) and all(_agree(theirs, ours) for theirs, ours in pairs)


def _agree(expected: torch.Tensor, out: torch.Tensor) -> bool:
    if expected.shape != out.shape or expected.dtype != out.dtype:
        return False
    difference = (expected.float() - out.float()).abs().max()
    return bool(difference <= _TOLERANCE[expected.dtype] * expected.float().abs().max())


def _angle_widths(module: nn.Module) -> list[int]:
    """The numbers of angles that a position may have: two for each inverse frequency, or one."""
    sizes = {buffer.numel() for name, buffer in module.named_buffers() if name.endswith("inv_freq")}
    return [2 * size for size in sorted(sizes)] + sorted(sizes)


def _angle_dtypes(module: nn.Module) -> set[torch.dtype]:
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

"""Finds the parts of a transformers model that Baton's fused layers can compute, by comparing what they compute.

A candidate has the children that such a part has. A fused layer is built from them, both compute the same random input,
and the fused layer replaces the part only if they agree within rounding. A part that does not agree stays, and its
products are replaced one by one (layers.py). Class names play no role.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from itertools import product
from statistics import NormalDist
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from baton.runner.adapters.adaptable import AdaptableProduct
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cpu.kernels.rows import Xielu
from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import activate, rms_norm
from baton.runner.backends.torch_states import above_cutoff
from baton.runner.model.attention_recognition import AttentionRecogniser, NotRecognised, norm_without_weight
from baton.runner.model.comparison import (
    NUM_ROWS,
    agree,
    agree_in_parts,
    angle_dtypes_of,
    angle_widths,
    children_of,
    factors_of,
    like_input,
    like_weights,
    linears_of,
    small_and_large_rows,
    told_layer,
)
from baton.runner.model.fused.attention import CalledAsAttention
from baton.runner.model.fused.low_rank import LowRankResidual, TermedMlp, terms_of, watched_terms
from baton.runner.model.fused.rows import (
    AnyNorm,
    FusedActivation,
    FusedLayerNorm,
    FusedMlp,
    FusedNorm,
    PlainMlp,
    SparseMlp,
)
from baton.runner.model.fused.streams import AlternatingUpdates
from baton.runner.model.probe_attention import EchoAttention
from baton.runner.model.states.layer_functions import keep_states_in_cache
from baton.runner.model.states.mixers import StateMixer
from baton.runner.model.states.recognition import state_mixer_of
from baton.runner.model.stored.layers import (
    forget_weights,
    halves_of,
    weight_of,
)

_EPSILONS = (1e-5, 1e-6)
"""What norms may add to the variance that don't say what they add."""
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu", "relu", "relu_squared")
_MLP_NAMES = (
    ("gate_up_proj", "down_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("input_linear", "output_linear"),
)
"""What models call the linear layers of a gated MLP: of gate and up, and the last one."""
_PLAIN_MLP_NAMES = (("up_proj", "down_proj"), ("c_fc", "c_proj"), ("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h"))
"""The same of an MLP without a gate."""
_ALTERNATING_NAMES = ("modality_router", "prediction_coefs", "correction_coefs")
"""What a part that predicts and corrects streams calls its linear layers: one for rows, two for what that one gives."""
_RESIDUAL_NAMES = ("linear_left", "linear_right")
"""The same of a part that adds a low-rank term to its rows."""
_OF_LAYER_NORMS = ({"weight"}, {"weight", "bias"})

Release = Callable[[nn.Module], None]


def fuse(module: nn.Module, operations: Operations, row_quantum: int, release: Release) -> str:
    """Replace recognised parts in place; `release` is called with every module that was replaced. `row_quantum`: torch
    computes multiples of this many rows.

    Returns why the last attention module that was not recognised was not; empty when all of them were.
    """
    why_not = ""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        _use_linear_layers(module)
        like = like_weights(module)
        attention = AttentionRecogniser(operations, angle_widths(module), angle_dtypes_of(module))
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
                    or _alternating_updates(child, operations, generator)
                    or _low_rank_residual(child, operations, generator)
                    or attention.fused(child, generator)
                )
            except NotRecognised as reason:
                why_not = f"{type(child).__name__}: {reason}"
                forget_weights(child)
                continue
            if fused is None:
                forget_weights(child)
                continue
            setattr(parent, name, fused)
            release(child)
        _fuse_activations(module, operations)
        _fuse_norms_without_weights(module, operations, like)
    return why_not


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
        is_of_layer = any(isinstance(part, CalledAsAttention) for part in parent.children())
        if is_of_layer and child is _activation_function(parent) and (activation := _activation_of(parent)):
            setattr(parent, name, FusedActivation(operations, activation))


def _fuse_norms_without_weights(module: nn.Module, operations: Operations, like: torch.Tensor) -> None:
    """Replace the norms without weights of layers, and of the rows before and behind all layers.

    Nothing in such a norm says how wide its rows are: those of a layer are as wide as those that its attention takes.
    """
    for parent, name, child in children_of(module):
        layers = [parent, *(layer for part in parent.children() if isinstance(part, nn.ModuleList) for layer in part)]
        parts = (part for layer in layers for part in layer.children() if isinstance(part, CalledAsAttention))
        if (attention := next(parts, None)) is not None:
            width = attention.products[0].num_inputs
            if (norm := norm_without_weight(child, width, like, operations)) is not None:
                setattr(parent, name, norm)


def gated_activation(apply_gate: Callable[[torch.Tensor], torch.Tensor]) -> Activation | None:
    """The activation `act` if `apply_gate` computes act(first half) * second half from [T, 2 N]; otherwise None."""
    x = torch.randn(16, 64, dtype=torch.float32, generator=torch.Generator().manual_seed(0)) * 3
    x[8:] *= 1000  # rows that show limits
    gate, up = x.chunk(2, dim=-1)
    out = apply_gate(x)
    return next((name for name in _ACTIVATIONS if torch.allclose(out, activate(gate, name) * up, atol=1e-5)), None)


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
    linear, activation = linears_of(child, _PLAIN_MLP_NAMES), _activation_function(child)
    if linear is None or activation is None:
        return None
    others = [part for name, part in child.named_children() if name not in linear and part is not activation]
    if not all(isinstance(part, nn.Dropout) for part in others):
        return None  # a whole layer, which takes more than rows
    up, down = linear.values()
    x = like_input(up, small_and_large_rows(up.in_features, generator))
    if not agree_in_parts(child(x)[0], down(activation(up(x)))[0]):
        return None
    known = known_activation(activation) or _xielu_of(activation)
    return PlainMlp(operations, up, down, known or activation, [*linear], row_quantum)


def _fused_mlp(
    child: Any, operations: Operations, generator: torch.Generator
) -> FusedMlp | SparseMlp | TermedMlp | None:
    linear = linears_of(child, _MLP_NAMES)
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
    x = like_input(down, small_and_large_rows(gate.shape[1], generator))
    try:
        with watched_terms(child) as called:
            expected = child(x, **told_layer(child))
    except (KeyError, TypeError):  # it asks for more than rows
        return None
    names, by_name = [*linear], dict(zip(linear, gate_and_up, strict=False))
    if terms := terms_of(by_name, called):
        termed = TermedMlp(operations, by_name, terms, (names[-1], down), activation)
        return termed if agree_in_parts(expected[0], termed(x)[0]) else None
    deviations = _deviations_of_mlp(child, gate_and_up, down, activation, x, expected)
    if deviations is not None and down.bias is None:
        return SparseMlp(operations, gate, up, weight_of(down), activation, [*linear], deviations)
    norms = (part for part in child.children() if isinstance(part, AnyNorm) and part.width == down.in_features)
    norm = next(norms, None)
    factors = (1.0, 1.0) if norm else _factors_of_mlp(child, gate_and_up, down, activation, x, expected)
    fused = FusedMlp(operations, gate, up, weight_of(down), down.bias, activation, [*linear], norm, factors)
    return fused if agree_in_parts(expected[0], fused(x)[0]) else None


def _factors_of_mlp(
    child: nn.Module,
    gate_and_up: Sequence[nn.Linear],
    down: nn.Linear,
    activation: Activation,
    x: torch.Tensor,
    expected: torch.Tensor,
) -> tuple[float, float]:
    """The numbers of a gated MLP that it multiplies what its gate gives with, and its result, to give `expected`."""
    factors = factors_of(child)
    if len(factors) == 1:
        return 1.0, 1.0
    gates, up = torch.cat([part(x) for part in gate_and_up], dim=-1).chunk(2, dim=-1)
    for of_gate, of_result in product(factors, factors):
        out = down(activate(gates.float() * of_gate, activation).to(up.dtype) * up) * of_result
        if agree_in_parts(expected[0], out[0]):
            return of_gate, of_result
    return 1.0, 1.0


def _deviations_of_mlp(
    child: nn.Module,
    gate_and_up: Sequence[nn.Linear],
    down: nn.Linear,
    activation: Activation,
    x: torch.Tensor,
    expected: torch.Tensor,
) -> float | None:
    """How many standard deviations above their row's mean the numbers of a gated MLP's gate must be to give `expected`.

    None: no share that the part has, of numbers that are left out, gives it.
    """
    shares = [number for number in factors_of(child) if number < 1.0]
    if not shares:
        return None
    gates, up = torch.cat([part(x) for part in gate_and_up], dim=-1).chunk(2, dim=-1)
    for share in shares:
        deviations = float(torch.tensor(NormalDist().inv_cdf(share), dtype=x.dtype))
        gated = activate(above_cutoff(gates.float(), deviations), activation).to(up.dtype) * up
        if agree_in_parts(expected[0], down(gated)[0]):
            return deviations
    return None


def _alternating_updates(child: Any, operations: Operations, generator: torch.Generator) -> AlternatingUpdates | None:
    """The updates that a part computes, whose norms are fused; None: it computes something else."""
    linear = linears_of(child, (_ALTERNATING_NAMES,))
    norm = next((part for part in child.children() if isinstance(part, FusedNorm)), None)
    scales = [*child.parameters(recurse=False)]
    if linear is None or norm is None or len(scales) != 1 or any(part.bias is not None for part in linear.values()):
        return None
    products = [AdaptableProduct.of_layer(operations, name, weight_of(part)) for name, part in linear.items()]
    router, _, last = linear.values()
    shape = (last.in_features, 1, NUM_ROWS, router.in_features)
    streams = like_input(router, torch.randn(shape, dtype=torch.float32, generator=generator))
    result = streams.flip(0)[0] * 2
    own = [float(number) for number in child.buffers(recurse=False) if number.numel() == 1]
    factor = own[0] if len(own) == 1 else 1.0

    def outputs(part: Any) -> list[torch.Tensor]:
        return [part.predict(streams), part.correct(streams, result), part.scale_corrected_output(result)]

    try:
        expected = outputs(child)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None  # its layers have these names and do something else
    of_each = (
        AlternatingUpdates(operations, products, norm, factor, scales[0], active) for active in range(last.in_features)
    )
    return next((updates for updates in of_each if all(map(agree, expected, outputs(updates)))), None)


def _low_rank_residual(child: Any, operations: Operations, generator: torch.Generator) -> LowRankResidual | None:
    """Rows plus the norm of a low-rank term, whose norm is fused; None: the part computes something else."""
    linear = linears_of(child, (_RESIDUAL_NAMES,))
    norm = next((part for part in child.children() if isinstance(part, FusedNorm)), None)
    if linear is None or norm is None or any(part.bias is not None for part in linear.values()):
        return None
    down, up = linear.values()
    if (up.out_features, up.in_features, norm.width) != (down.in_features, down.out_features, down.in_features):
        return None
    x = like_input(down, small_and_large_rows(down.in_features, generator))
    fused = LowRankResidual(operations, linear, norm)
    return fused if agree_in_parts(child(x)[0], fused(x)[0]) else None


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


def _activation_of(child: Any) -> Activation | None:
    """The activation that a part has, if it is a known one; of a part that has none the most common."""
    return known_activation(_activation_function(child) or functional.silu)


def known_activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Activation | None:
    """The activation that a function computes; None: none of them."""
    return next((name for name in _ACTIVATIONS if _computes(function, name)), None)


def _computes(function: Callable[[torch.Tensor], torch.Tensor], activation: Activation) -> bool:
    # The dtype is named, since another thread that loads a model changes the default.
    x = _numbers_of_all_sizes(torch.float32)
    return torch.allclose(function(x), activate(x, activation), atol=1e-6)


def _numbers_of_all_sizes(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of which the largest show where an activation cuts numbers off."""
    large = torch.tensor([-1e4, -100, -20, 20, 100, 1e4], dtype=dtype)
    return torch.cat((torch.linspace(-9, 9, 256, dtype=dtype), large))


def _xielu_of(function: Callable[[torch.Tensor], torch.Tensor]) -> Xielu | None:
    """The xIELU that computes the same as a function, with numbers that follow from its values; None: none does."""
    if not isinstance(function, nn.Module):
        return None
    compute = copy.deepcopy(function).double()
    one, two, low, zero = compute(torch.tensor([1.0, 2.0, -8.0, 0.0], dtype=torch.float64)).tolist()
    linear = 2 * one - two / 2
    negative = (low + 8 * linear) / (math.expm1(-8) + 8)
    if not -abs(negative) < zero * math.copysign(1, negative) <= 0:
        return None  # e^near is not between 0 and 1
    found = Xielu(two / 2 - one, negative, linear, math.log1p(zero / negative))
    x = _numbers_of_all_sizes(torch.float64)
    return found if torch.allclose(compute(x), found.of(x), atol=1e-6) else None


def _activation_function(child: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    names = ("act_fn", "activation_fn", "activation", "act")
    return next((part for name in names if callable(part := getattr(child, name, None))), None)

"""Finds mixtures of experts in a transformers model by what their routers compute, and replaces them.

A mixture is called with random rows, and experts that only remember what they are given. What its router has chosen is
compared with candidates of what routers compute; the one that agrees best replaces it, if it agrees within rounding.
Names only suggest candidates. A mixture that no candidate explains stays, and torch computes its router. A router that
a layer calls itself, beside experts, is recognised in the same way by what it gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple, get_args

import torch
from torch import nn
from torch.nn import functional

from baton.runner.backends.operations import Operations
from baton.runner.backends.routing import Routing, Scores, choose
from baton.runner.model.comparison import agree, angle_widths, children_of
from baton.runner.model.fused.attention import CalledAsAttention
from baton.runner.model.fused.rows import FusedMlp, FusedNorm, PlainMlp
from baton.runner.model.mixtures.attention import expert_attention_of
from baton.runner.model.mixtures.chosen import ChosenProduct
from baton.runner.model.mixtures.fused import FusedMixture, MixtureParts
from baton.runner.model.mixtures.router import FusedRouter, RouterParts
from baton.runner.model.mixtures.separate import mixture_of_separate_products
from baton.runner.model.mixtures.stacked import Echo, Recognised, stacked_experts_of
from baton.runner.model.stored.layers import experts_on_file, forget_weights, held_experts, make_experts_plain
from baton.runner.model.stored.plan import is_experts, is_linear

_NUM_ROWS = 64
"""So many rows are routed: an expert's group that no row of them tells apart is hardly ever chosen otherwise."""
_SCORES = get_args(Scores)
_EPS = (0.0, 1e-6)
_RESULT_FACTORS = (1.0, 0.5)
"""What the sum of experts and shared rows may be multiplied with: it may be their average."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""The largest difference of weights, as a share of a row's largest."""
_AGREEING = {torch.float32: 1.0, torch.bfloat16: 0.9}
"""The share of rows that must agree: scores that are rounded may be equal."""


class _EchoExperts:
    """Stands for packed experts: remembers what they are given, and gives random rows."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self.given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.gave: list[torch.Tensor] = []

    def compute(
        self, _module: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.randn(hidden.shape, dtype=torch.float32, generator=self._generator).to(hidden)
        self.given.append((hidden, chosen, weights))
        self.gave.append(out)
        return out


class _Router(NamedTuple):
    """What may give a router's logits."""

    path: str
    weight: torch.Tensor
    bias: torch.Tensor | None


class _Seen(NamedTuple):
    """What a mixture gave its experts."""

    chosen: torch.Tensor
    weights: torch.Tensor


class _Behind(NamedTuple):
    """What a mixture does with the rows of its experts: fields of MixtureParts."""

    shared: str | None
    shared_gate: str | None
    factor: float
    result_factor: float
    norm: str | None
    widen: str | None


def fuse_mixtures(module: nn.Module, operations: Operations, like: torch.Tensor) -> None:
    """Replace the mixtures and the attention of experts of a model that are recognised.

    MLPs and norms have been fused, and experts have not. `like`: in the dtype and on the device of rows.
    """
    with torch.inference_mode():
        widths = angle_widths(module)
        for parent, name, child in children_of(module):
            with experts_on_file(child):
                fused = _fused(parent, child, operations, like, widths)
            forget_weights(child)
            if fused is not None:
                setattr(parent, name, fused)
        for part in module.modules():
            if held_experts(part) and not is_experts(part) and not isinstance(part, ChosenProduct):
                make_experts_plain(part, like)  # nothing else multiplies them


def _fused(
    parent: nn.Module, child: nn.Module, operations: Operations, like: torch.Tensor, widths: Sequence[int]
) -> nn.Module | None:
    """What computes a part of `parent` on Baton's operations; None: it is none of what is recognised here."""
    attention = expert_attention_of(child, operations, widths)
    if (whole := attention or mixture_of_separate_products(child, operations)) is not None:
        return whole
    stacked = _stacked_experts_of(child, like)
    if (parts := _parts_of(child, like.dtype, stacked)) is not None:
        children = dict(child.named_children()) | {of: found.experts for of, found in stacked.items()}
        return FusedMixture(operations, children, parts)
    is_of_layer = any(isinstance(part, CalledAsAttention) for part in parent.children())
    if not is_of_layer or not any(is_experts(part) for part in parent.children()):
        return None
    router = _router_parts_of(child, operations, like.dtype)
    return None if router is None else FusedRouter(operations, dict(child.named_children()), router)


def _stacked_experts_of(child: nn.Module, like: torch.Tensor) -> dict[str, Recognised]:
    """What stands for the experts among a part's children that transformers' ExpertsInterface doesn't compute."""
    generator = torch.Generator().manual_seed(0)
    found = ((name, stacked_experts_of(part, generator, like)) for name, part in child.named_children())
    return {name: experts for name, experts in found if experts is not None}


def _parts_of(child: nn.Module, dtype: torch.dtype, stacked: Mapping[str, Recognised]) -> MixtureParts | None:
    experts = [name for name, part in child.named_children() if is_experts(part) or name in stacked]
    if len(experts) != 1:
        return None
    # A layer that narrows rows before the experts could be a router, too.
    found = (_parts_with(child, experts[0], router, dtype, stacked) for router in _routers_of(child, experts[0]))
    return next((parts for parts in found if parts is not None), None)


def _parts_with(
    child: nn.Module, experts: str, router: _Router, dtype: torch.dtype, stacked: Mapping[str, Recognised]
) -> MixtureParts | None:
    """What a mixture computes, if this is its router."""
    weight = router.weight
    # The same rows for each layer: what is found of it must not depend on which other layers there are.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _NUM_ROWS, weight.shape[1], dtype=torch.float32, generator=generator).to(weight.device, dtype)
    holder = child.get_submodule(experts)
    echo: Echo | _EchoExperts
    if (found_experts := stacked.get(experts)) is None:
        echo = _EchoExperts(generator)
        object.__setattr__(holder, "baton_experts", echo)
    else:
        echo = Echo(found_experts.call, weight.shape[0], x[0], generator)
        setattr(child, experts, echo)
    try:
        given = child(x)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        return None  # it takes more than rows
    finally:
        if found_experts is None:
            object.__delattr__(holder, "baton_experts")
        else:
            setattr(child, experts, holder)
    out = given[0] if isinstance(given, tuple) else given
    if len(echo.given) != 1 or not isinstance(out, torch.Tensor):
        return None
    if out.numel() != x.numel() or out.shape[-1:] != x.shape[-1:]:  # others are read as they are, flat ones, too
        return None
    hidden, chosen, weights = echo.given[0]
    if chosen.ndim != 2:
        return None
    narrow = None
    if hidden.shape != x[0].shape or not torch.equal(hidden, x[0]):
        narrow = next((name for name, layer in _layers_of(child, x[0], hidden) if agree(hidden, layer(x[0]))), None)
        if narrow is None:
            return None
    found = _routing(child, router, x[0], _Seen(chosen, weights))
    behind = _behind(child, x, echo.gave[0], out.reshape(x.shape), is_narrow=narrow is not None)
    if found is None or behind is None:
        return None
    gives_tuple = isinstance(given, tuple)
    return MixtureParts(router.path, experts, *found, **behind._asdict(), narrow=narrow, gives_tuple=gives_tuple)


def _layers_of(child: nn.Module, x: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of a mixture that may make rows `out` [T, N] of x [T, K]."""
    for name, part in child.named_children():
        if isinstance(part, nn.Linear) and (part.in_features, part.out_features) == (x.shape[-1], out.shape[-1]):
            yield name, part


class _RouterCall(NamedTuple):
    """What a router that is a part of its own was seen to compute."""

    multiplied: torch.Tensor
    """The rows [T, K] that its product was given."""
    given: tuple[Any, ...]


def _router_parts_of(child: nn.Module, operations: Operations, dtype: torch.dtype) -> RouterParts | None:
    """What a part of a layer computes, if it is a router whose product is a layer of its own."""
    routers = [] if is_experts(child) else list(_routers_of(child, None))
    if len(routers) != 1 or not routers[0].path or not is_linear(child.get_submodule(routers[0].path)):
        return None
    router, generator = routers[0], torch.Generator().manual_seed(0)
    rows = torch.randn(_NUM_ROWS, router.weight.shape[1], dtype=torch.float32, generator=generator)
    x = rows.to(router.weight.device, dtype)
    # Small, medium and large rows for the norm: the small ones show where eps is added.
    sizes = torch.tensor([1e-3, 1e-2, 1.0, 3.0]).repeat(_NUM_ROWS // 4)[:, None]
    of_norm = (rows * sizes).to(x)
    try:
        seen, seen_of_norm = _called(child, router, x), _called(child, router, of_norm)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        return None  # it takes more than rows
    if seen is None or seen_of_norm is None:
        return None
    before = next(
        (
            (norm, factor)
            for norm, factor in product(_norms(child, router, operations, dtype), _factors(child))
            if agree(seen_of_norm.multiplied, (of_norm if norm is None else norm.rows(of_norm)) * factor)
        ),
        None,
    )
    if before is None:
        return None
    at = [(place, out) for place, out in enumerate(seen.given) if isinstance(out, torch.Tensor) and out.ndim == 2]
    for (chosen_at, chosen), (weights_at, weights) in product(at, at):
        if chosen.is_floating_point() or not weights.is_floating_point() or chosen.shape != weights.shape:
            continue
        found = _routing(child, router, seen.multiplied, _Seen(chosen, weights))
        if found is not None:
            return RouterParts(router.path, *found, *before, len(seen.given), chosen_at, weights_at)
    return None


def _called(child: nn.Module, router: _Router, x: torch.Tensor) -> _RouterCall | None:
    """A call of a router with rows x [T, K]; None if it gives one thing, or multiplies other rows than these once."""
    multiplied: list[torch.Tensor] = []

    def keep(_layer: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        multiplied.append(given[0])

    handle = child.get_submodule(router.path).register_forward_pre_hook(keep)
    try:
        given = child(x)
    finally:
        handle.remove()
    if not isinstance(given, tuple) or len(multiplied) != 1 or multiplied[0].shape != x.shape:
        return None
    return _RouterCall(multiplied[0], given)


def _norms(child: nn.Module, router: _Router, operations: Operations, dtype: torch.dtype) -> Iterator[FusedNorm | None]:
    """Norms that a router may compute of its rows; None: of no norm."""
    yield None
    width = router.weight.shape[1]
    own = [values.detach() for _, values in (*child.named_parameters(), *child.named_buffers())]
    ones = torch.ones(width, dtype=dtype, device=router.weight.device)
    weights = [ones, *(values.to(dtype) for values in own if values.shape == (width,))]
    for weight, eps in product(weights, _factors(child)):
        yield FusedNorm(operations, weight, eps, plus_one=False)


def _routers_of(child: nn.Module, experts: str | None) -> Iterator[_Router]:
    """The modules beside experts and MLPs that have a weight of two dimensions, for more than one output."""
    skipped: list[str] = []
    for path, part in child.named_modules():
        if path == experts or isinstance(part, FusedMlp | PlainMlp) or any(path.startswith(f"{at}.") for at in skipped):
            skipped.append(path)
            continue
        weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
        if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.shape[0] > 1:
            yield _Router(path, weight.detach(), None if bias is None else bias.detach())


def _routing(child: nn.Module, router: _Router, x: torch.Tensor, seen: _Seen) -> tuple[Routing, torch.dtype] | None:
    """What a router computes of rows x [T, K], and the dtype of its logits; None for what no candidate explains."""
    num_experts = router.weight.shape[0]
    expected = _dense(seen.chosen, seen.weights, num_experts)
    best: tuple[float, Routing, torch.dtype] | None = None
    for dtype in dict.fromkeys((x.dtype, torch.float32)):
        logits = _logits(router, x, dtype)
        for choice in _choices(child, router, num_experts, seen):
            chosen, _ = choose(logits, choice)
            is_same = (_dense(chosen, torch.ones_like(seen.weights), num_experts) == (expected != 0)).all(1)
            if is_same.float().mean() < _AGREEING[x.dtype]:
                continue
            for routing in _weightings(child, router, choice):
                difference = (_dense(*choose(logits, routing), num_experts) - expected).abs().amax(1)
                is_near = difference <= _TOLERANCE[x.dtype] * expected.abs().amax(1)
                error = float(difference.mean())
                if is_near.float().mean() >= _AGREEING[x.dtype] and (best is None or error < best[0]):
                    best = error, routing, dtype
    return None if best is None else best[1:]


def _logits(router: _Router, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bias = None if router.bias is None else router.bias.to(dtype)
    return functional.linear(x.to(dtype), router.weight.to(dtype), bias)


def _dense(chosen: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The weights [T, num_experts] of all experts, zero for those that are not chosen."""
    empty = torch.zeros(chosen.shape[0], num_experts, dtype=torch.float32, device=chosen.device)
    return empty.scatter_(1, chosen.long(), weights.float())


def _choices(child: nn.Module, router: _Router, num_experts: int, seen: _Seen) -> Iterator[Routing]:
    """Candidates that may choose other experts."""
    most, biases = seen.chosen.shape[1], [None, *_vectors(child, router, num_experts)]
    groups = [(*both, by_two) for both in _groups_of(child, num_experts, most) for by_two in (True, False)]
    for scores, bias, (count, fewer, by_two) in product(_SCORES, biases, [*groups, (1, 1, False)]):
        yield Routing(
            *(num_experts, most, scores, seen.weights.dtype, bias),
            groups=count,
            most_groups=fewer,
            groups_by_two=by_two,
        )


def _weightings(child: nn.Module, router: _Router, choice: Routing) -> Iterator[Routing]:
    """Candidates that choose the same experts, with other weights."""
    if choice.scores == "softmax_of_near":
        # Twice a small number of the model: if all logits were near, it would be softmax.
        yield from (replace(choice, near=2 * number) for number in _factors(child) if number < 0.5)
        return
    factors = [None, *_vectors(child, router, choice.num_experts)]
    for normalised, factor, of_experts in product((False, True), _factors(child), factors):
        for eps in _EPS if normalised else (0.0,):
            yield replace(choice, normalised=normalised, eps=eps, factor=factor, expert_factors=of_experts)


def _vectors(child: nn.Module, router: _Router, num_experts: int) -> Iterator[torch.Tensor]:
    """Numbers for each expert that aren't part of the logits: what may be added to scores for the choice alone, or what
    weights may be multiplied with."""
    for path, values in (*child.named_parameters(), *child.named_buffers()):
        if values.numel() == num_experts and path != f"{router.path}.bias":
            yield values.detach().flatten().float()


def _attributes(child: nn.Module) -> Iterator[tuple[str, Any]]:
    for part in child.modules():
        if not isinstance(part, FusedMlp | PlainMlp) and not is_linear(part):
            yield from ((name, value) for name, value in vars(part).items() if not name.startswith("_"))


def _groups_of(child: nn.Module, num_experts: int, most: int) -> Iterator[tuple[int, int]]:
    """Numbers of groups, and of groups of which experts are chosen, that a mixture may mean."""
    numbers = {value for name, value in _attributes(child) if "group" in name and type(value) is int}
    for groups, fewer in product(sorted(numbers), repeat=2):
        if groups > fewer > 0 and num_experts % groups == 0 and most <= num_experts // groups * fewer:
            yield groups, fewer


def _factors(child: nn.Module) -> list[float]:
    """The numbers that weights or rows may be multiplied with."""
    floats = {value for _, value in _attributes(child) if type(value) is float and value > 0.0}
    return [1.0, *sorted(floats - {1.0})]


def _behind(
    child: nn.Module, x: torch.Tensor, experts: torch.Tensor, out: torch.Tensor, *, is_narrow: bool
) -> _Behind | None:
    """What a mixture does with the rows of its experts; None: something else than is known.

    `is_narrow`: whether a layer follows that makes rows like x of them.
    """
    children = dict(child.named_children())
    mlps: list[str | None] = [name for name, part in children.items() if isinstance(part, FusedMlp | PlainMlp)]
    gates: list[str | None] = [
        name for name, part in children.items() if isinstance(part, nn.Linear) and part.out_features == 1
    ]
    norms: list[str | None] = [name for name, part in children.items() if isinstance(part, FusedNorm)]
    wideners: list[str | None] = [name for name, _ in _layers_of(child, experts, x)] if is_narrow else [None]
    gates = [None] if is_narrow else gates
    parts, factors = (mlps or [None], gates or [None], norms or [None]), (_factors(child), _RESULT_FACTORS)
    for widen, shared, gate, norm, factor, of_result in product(wideners, *parts, *factors):
        rows = experts.view(*x.shape[:-1], -1) * factor
        if widen is not None:
            rows = children[widen](rows)
        if shared is not None:
            added = children[shared](x)
            if gate is not None:
                added = added * torch.sigmoid(children[gate](x))
            rows = rows + added
        rows = rows * of_result
        if norm is not None:
            rows = children[norm](rows)
        if agree(out, rows):
            return _Behind(shared, gate, factor, of_result, norm, widen)
    return None

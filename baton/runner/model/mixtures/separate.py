"""Mixtures whose experts' first and last products are parts of their own, beside the router and a bias of the sum.

Jetmoe's are such ones. A row's weights are the softmax of the logits of its experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from baton.runner.backends.operations import Operations
from baton.runner.backends.routing import Routing, choose
from baton.runner.model.comparison import agree_in_parts, like_input, small_and_large_rows
from baton.runner.model.mixtures.fused import FusedMixture, MixtureParts
from baton.runner.model.mixtures.stacked import StackedExperts, stacked_weights

UP, DOWN, ROUTER = "input_linear", "output_linear", "router"
"""The names of the parts with the first and the last products, and of the router, in a module with experts."""
_EXPERTS = "experts"
"""The name of the part that has both products then."""


def mixture_of_separate_products(child: Any, operations: Operations) -> FusedMixture | None:
    """The mixture that computes what such a module does; None for any other module."""
    up, down = (stacked_weights(getattr(child, name, None), "weight") for name in (UP, DOWN))
    router, activation, bias = (_attribute(child, name) for name in (ROUTER, "activation", "bias"))
    layer, most = _attribute(router, "layer"), _attribute(router, "top_k")
    if up is None or down is None or bias is None:
        return None
    if not isinstance(layer, nn.Linear) or not isinstance(most, int) or not callable(activation):
        return None
    if up.shape[2] != layer.in_features or tuple(down.shape) != (up.shape[0], up.shape[2], up.shape[1] // 2):
        return None
    generator = torch.Generator().manual_seed(0)
    x = like_input(layer, small_and_large_rows(layer.in_features, generator))[0]
    try:
        expected = child(x[None])
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None  # it takes more than rows
    routing = Routing(layer.out_features, most, "softmax_of_chosen", x.dtype)
    experts = StackedExperts(activation, up, down)
    chosen, weights = choose(layer(x), routing)
    dense = torch.zeros(len(x), len(up), dtype=torch.float32, device=x.device).scatter_(1, chosen.long(), weights)
    terms = [experts.computed(number, x).float() * dense[:, number : number + 1] for number in range(len(up))]
    out = torch.stack(terms).sum(0).to(x.dtype) + bias
    if not isinstance(expected, torch.Tensor) or not agree_in_parts(expected[0], out):
        return None
    parts = MixtureParts(f"{ROUTER}.layer", _EXPERTS, routing, x.dtype, bias=bias.detach().clone()[None])
    return FusedMixture(operations, {ROUTER: router, _EXPERTS: experts}, parts)


def _attribute(part: Any, *path: str) -> Any:
    """The attribute of an attribute, and so on; None if there is none."""
    for name in path:
        part = getattr(part, name, None)
    return part

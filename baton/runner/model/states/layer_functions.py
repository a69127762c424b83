"""The functions through which transformers' layers keep states, with Baton's in their place.

transformers has no interface for these as it has for attention: the layers of all its hybrid models call functions of
the same names and arguments in their own modules (`causal_conv1d_fn`, `torch_chunk_gated_delta_rule` and others), which
compute whole sequences. A layer's methods that call one get globals of their own, in which its name stands for Baton's
function for this layer. So what is around the states stays transformers' code, and class names play no role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from baton.runner.model.states.keepers import (
    DELTA_RULE_NORM_EPS,
    Convolution,
    KeepStates,
    RecurrentRows,
    UnsupportedState,
)

_WITHOUT_EFFECT = frozenset(
    {"chunk_size", "position_embeddings", "output_router_logits", "use_mambapy", "use_associative_scan"}
)
"""What layers tell these functions that changes no result. Other keywords that a function does not name are refused,
unless their value is None or False, which ask for nothing."""


def keep_states_in_cache(module: nn.Module) -> None:
    """Make every layer of a model that keeps a state ask its `baton_attend` for it, which `bind` sets."""
    for part in module.modules():
        if getattr(part, "layer_idx", None) is None:
            continue
        for name, method, names in _stateful_methods(type(part)):
            own = {called: partial(_FUNCTIONS[called], part) for called in names}
            function = FunctionType(
                method.__code__, {**method.__globals__, **own}, name, method.__defaults__, method.__closure__
            )
            function.__kwdefaults__ = method.__kwdefaults__
            # nn.Module's own __setattr__ is for parameters and parts.
            object.__setattr__(part, name, MethodType(function, part))


def _stateful_methods(kind: type) -> Iterator[tuple[str, FunctionType, list[str]]]:
    """The methods of a class that call functions which keep states: their names, without decorators, and which."""
    for name in dir(kind):
        method = getattr(kind, name)
        while hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        if isinstance(method, FunctionType) and (called := sorted(_FUNCTIONS.keys() & set(method.__code__.co_names))):
            yield name, method, called


def _require_known(layer: Any, keywords: Mapping[str, Any]) -> None:
    """Raise UnsupportedState for keywords that ask for what is not computed here."""
    unknown = [
        name
        for name, value in keywords.items()
        if name not in _WITHOUT_EFFECT and value is not None and value is not False
    ]
    if unknown:
        raise UnsupportedState(
            f"its layer {layer.layer_idx} computes its state with {', '.join(unknown)}, which is not computed here"
        )


def _states_of(layer: Any) -> KeepStates:
    keeper: KeepStates = layer.baton_attend.states
    return keeper


def _convolve(
    layer: Any,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **keywords: Any,
) -> torch.Tensor:
    """`causal_conv1d_fn`: hidden_states [1, W, T], weight [W, K] to [1, W, T]."""
    _require_known(layer, keywords)
    if activation not in (None, "silu", "swish"):
        raise UnsupportedState(f"its layer {layer.layer_idx} convolves with the activation {activation!r}")
    by = Convolution(
        weight.detach(), None if bias is None else bias.detach(), "silu" if activation else None, weight.shape[0]
    )
    rows = hidden_states[0].transpose(0, 1)
    return _states_of(layer).convolve(layer.layer_idx, rows, by).transpose(0, 1).unsqueeze(0)


def _delta_rule(
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """`torch_chunk_gated_delta_rule`: query and key [1, T, G, DK], value [1, T, H, DV], g [1, T, H]; and
    `chunk_kimi_delta_attention`, with g [1, T, H, DK]."""
    _require_known(layer, keywords)
    rows = RecurrentRows(
        query[0],
        key[0],
        value[0],
        g[0].float(),
        beta[0].float(),
        query.shape[-1] ** -0.5,
        DELTA_RULE_NORM_EPS if use_qk_l2norm_in_kernel else None,
        value.shape[2],
    )
    return _states_of(layer).recur(layer.layer_idx, rows).unsqueeze(0), None


def _step_sizes(dt: torch.Tensor, bias: torch.Tensor | None, has_softplus: bool) -> torch.Tensor:
    """What a Mamba layer multiplies decays and values with: dt, with the bias and through a softplus if it asks so."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return functional.softplus(dt) if has_softplus else dt


def _mamba2_scan(
    layer: Any,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **keywords: Any,
) -> torch.Tensor | tuple[torch.Tensor, None]:
    """`mamba2_chunk_scan`: hidden_states [1, T, H, DV], dt [1, T, H], B and C [1, T, G, DK] (arXiv 2405.21060)."""
    _require_known(layer, keywords)
    dt = _step_sizes(dt, dt_bias, dt_softplus).clamp(*dt_limit).float()
    query, key, value = (rows.float()[0] for rows in (C, B, hidden_states))
    rows = RecurrentRows(
        query,
        key,
        value,
        (A.float() * dt)[0],
        dt[0],
        1.0,
        None,
        value.shape[1],
        has_delta_rule=False,
        skip=None if D is None else D.detach().float(),
    )
    out = _states_of(layer).recur(layer.layer_idx, rows).unsqueeze(0)
    return (out, None) if return_final_states else out


def _mamba_scan(
    layer: Any,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **keywords: Any,
) -> torch.Tensor | tuple[torch.Tensor, None]:
    """`mamba_selective_scan`: hidden_states, dt and z [1, W, T], A [W, DK], B and C [1, DK, T] (arXiv 2312.00752).

    Each of the W channels is a head with values of one number and decays of its own.
    """
    _require_known(layer, keywords)
    bias = None if delta_bias is None else delta_bias[..., None]
    dt = _step_sizes(dt, bias, delta_softplus).float()[0].transpose(0, 1)
    value = hidden_states.float()[0].transpose(0, 1)[..., None]
    query, key = (rows.float().transpose(1, 2)[0].unsqueeze(1) for rows in (C, B))
    rows = RecurrentRows(
        query,
        key,
        value,
        dt,
        dt,
        1.0,
        None,
        value.shape[1],
        has_delta_rule=False,
        skip=None if D is None else D.detach().float(),
        rates=A.float().T,
    )
    out = _states_of(layer).recur(layer.layer_idx, rows)[..., 0]
    out = out.transpose(0, 1).unsqueeze(0)
    if z is not None:
        out = out * functional.silu(z)
    return (out, None) if return_last_state else out


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _mamba_scan,
}

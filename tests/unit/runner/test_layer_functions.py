"""The functions through which transformers' layers keep states: Baton's ask for the same recurrences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.jamba.modeling_jamba import mamba_selective_scan
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

from baton.runner.model.attention import number_layers
from baton.runner.model.comparison import told_layer
from baton.runner.model.states.keepers import Convolution, ProbeStates, RecurrentRows, UnsupportedState
from baton.runner.model.states.layer_functions import keep_states_in_cache
from tests.support.kernel_inputs import randn


class InOneGo:
    """Computes what is asked for as `RecurrenceCall` says it, of one sequence without any state before it."""

    def convolve(self, layer: int, rows: torch.Tensor, by: Convolution) -> torch.Tensor:
        raise AssertionError("no convolution was expected")

    def recur(self, layer: int, rows: RecurrentRows) -> torch.Tensor:
        query, key, value = rows.query.float(), rows.key.float(), rows.value.float()
        if rows.norm_eps is not None:
            query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + rows.norm_eps) for x in (query, key))
        each = value.shape[1] // query.shape[1]
        query, key = ((x * scale).repeat_interleave(each, 1) for x, scale in ((query, rows.scale), (key, 1.0)))
        decay = rows.decays if rows.decays.dim() == 3 else rows.decays[..., None]
        state, out = torch.zeros(*key.shape[1:], value.shape[2]), []
        for q, k, v, d, at in zip(query, key, value, decay, range(len(value)), strict=True):
            state = state * d.exp()[..., None]
            lacking = v - (state * k[..., None]).sum(1) if rows.has_delta_rule else v
            added = lacking if rows.beta is None else lacking * rows.beta[at][:, None]
            state = state + k[..., None] * added[:, None]
            read = (state * q[..., None]).sum(1)
            out.append(read if rows.skip is None else read + v * rows.skip[:, None])
        return torch.stack(out)


class DeltaLayer(nn.Module):
    """Calls its function as kimi_linear's layers do."""

    layer_idx = 3
    baton_attend = SimpleNamespace(states=InOneGo())

    def forward(self, **given: Any) -> torch.Tensor:
        out: torch.Tensor = chunk_kimi_delta_attention(**given)[0]
        return out


class MambaLayer(nn.Module):
    """Calls its function as jamba's layers do."""

    layer_idx = 3
    baton_attend = SimpleNamespace(states=InOneGo())

    def forward(self, **given: Any) -> torch.Tensor:
        out: torch.Tensor = mamba_selective_scan(**given)
        return out


def kimi_inputs() -> dict[str, Any]:
    rows, heads, width = 7, 4, 8
    return {
        "query": randn(1, rows, heads, width, seed=1),
        "key": randn(1, rows, heads, width, seed=2),
        "value": randn(1, rows, heads, width, seed=3),
        "g": -randn(1, rows, heads, width, seed=4).abs(),
        "beta": randn(1, rows, heads, seed=5).sigmoid(),
        "use_qk_l2norm_in_kernel": True,
    }


def mamba_inputs() -> dict[str, Any]:
    rows, channels, width = 7, 6, 8
    return {
        "hidden_states": randn(1, channels, rows, seed=1),
        "dt": randn(1, channels, rows, seed=2),
        "A": -randn(channels, width, seed=3).exp(),
        "B": randn(1, width, rows, seed=4),
        "C": randn(1, width, rows, seed=5),
        "D": randn(channels, seed=6),
        "z": randn(1, channels, rows, seed=7),
        "delta_bias": randn(channels, seed=8),
        "delta_softplus": True,
    }


@pytest.mark.parametrize(("layer", "given"), [(DeltaLayer(), kimi_inputs()), (MambaLayer(), mamba_inputs())])
def test_a_layer_computes_with_baton_what_it_computes_with_transformers(
    layer: nn.Module, given: dict[str, Any]
) -> None:
    expected = layer(**given)
    keep_states_in_cache(layer)
    asked = layer(**given)
    assert not torch.equal(asked, expected)  # it is summed in another order
    torch.testing.assert_close(asked, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layer", "given"), [(DeltaLayer(), kimi_inputs()), (MambaLayer(), mamba_inputs())])
def test_what_a_layer_asks_for_besides_is_refused(layer: nn.Module, given: dict[str, Any]) -> None:
    keep_states_in_cache(layer)
    with pytest.raises(UnsupportedState, match="layer 3 computes its state with seq_idx, which"):
        layer(**given, seq_idx=torch.zeros(7))
    layer(**given, seq_idx=None, chunk_size=16)


def test_a_state_without_numbers_is_refused() -> None:
    """A configuration can ask for one: a convolution of one tap sees no token before."""
    with pytest.raises(UnsupportedState, match="layer 3 has a convolution of one tap"):
        ProbeStates().convolve(3, torch.zeros(5, 4), Convolution(torch.zeros(4, 1), None, None, 4))
    rows, empty = torch.zeros(5, 2, 4), torch.zeros(5, 2, 0)
    with pytest.raises(UnsupportedState, match="layer 3 has a recurrence without numbers"):
        ProbeStates().recur(3, RecurrentRows(empty, empty, rows, torch.zeros(5, 2), None, 1.0, None, 2))


def test_attention_that_is_told_its_layer_with_each_call_gets_the_number_of_its_place() -> None:
    """The layers of zamba2 do so, which share the weights of their attention."""

    class Layer(nn.Module):
        def __init__(self, layer_idx: int) -> None:
            super().__init__()
            self.layer_idx = layer_idx

    class Told(nn.Module):
        def forward(self, x: torch.Tensor, layer_idx: int) -> torch.Tensor:
            return x * layer_idx

    layers = nn.ModuleList([Layer(0), nn.ModuleDict({"mamba": Layer(1), "attention": Layer(-1), "mlp": Told()})])
    number_layers(nn.ModuleDict({"others": nn.ModuleList([Layer(-1)]), "layers": layers}), 2)
    assert [part.layer_idx for part in layers.modules() if isinstance(part, Layer)] == [0, 1, 1]
    assert [told_layer(part) for part in layers[1].children()] == [{}, {}, {"layer_idx": 1}]

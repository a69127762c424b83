"""Layers that keep states are taken by Baton's loop if a mixer computes and asks for the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.model.recognition import fuse
from baton.runner.model.states import layer_functions
from baton.runner.model.states.mixers import GatedDeltaNet, Mamba2, ShortConvolution
from baton.runner.model.states.selective_scan import SelectiveScan
from tests.support.listed_types import LISTED_TYPES

MODELS = {**LISTED_TYPES, "bamba of one group": {**LISTED_TYPES["bamba"], "mamba_n_groups": 1}}


def layer(kind: type[nn.Module], name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A layer of this kind in a module of its own, whose tensors are all random."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(**MODELS[name])
    index = next(i for i, of_layer in enumerate(config.layer_types) if of_layer != "full_attention")
    built = kind(config, index)
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.3)
    holder = nn.Module()
    holder.layer = built.to(dtype)
    return holder.requires_grad_(False)


def fused(holder: nn.Module) -> nn.Module:
    fuse(holder, TorchOperations(1), 8, lambda part: None)
    return holder.get_submodule("layer")


LAYERS = [
    (Lfm2ShortConv, "lfm2", ShortConvolution),
    (Qwen3_5GatedDeltaNet, "qwen3_5_text", GatedDeltaNet),
    (Qwen3NextGatedDeltaNet, "qwen3_next", GatedDeltaNet),
    (OlmoHybridGatedDeltaNet, "olmo_hybrid", GatedDeltaNet),
    (BambaMixer, "bamba", Mamba2),
    (BambaMixer, "bamba of one group", Mamba2),
    (NemotronHMamba2Mixer, "nemotron_h", Mamba2),
    (MambaMixer, "mamba", SelectiveScan),
    (JambaMambaMixer, "jamba", SelectiveScan),
    (KimiLinearDeltaAttention, "kimi_linear", GatedDeltaNet),
    (BailingHybridDeltaAttention, "bailing_hybrid", GatedDeltaNet),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "name", "mixer"), LAYERS)
def test_a_layer_that_keeps_a_state_becomes_a_mixer(kind: Any, name: str, mixer: type, dtype: torch.dtype) -> None:
    assert type(fused(layer(kind, name, dtype))) is mixer


def change_by(tensor: torch.Tensor, amount: float) -> None:
    tensor += amount


def double(part: Any) -> None:
    part.register_forward_hook(lambda _part, _given, out: 2 * out)


def with_other(name: str) -> Callable[[Any], None]:
    """Let a layer compute with another tensor than it says: some of them only what it asks of its state tells."""

    def change(part: Any) -> None:
        tensor = part.get_parameter(name)
        part.register_forward_pre_hook(lambda *_: change_by(tensor, 0.5))
        part.register_forward_hook(lambda *_: change_by(tensor, -0.5))

    return change


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        *((kind, name, double) for kind, name, _ in LAYERS),
        (Lfm2ShortConv, "lfm2", with_other("conv.weight")),
        *((Qwen3_5GatedDeltaNet, "qwen3_5_text", with_other(of)) for of in ("A_log", "dt_bias", "conv1d.weight")),
        *((MambaMixer, "mamba", with_other(of)) for of in ("A_log", "dt_proj.bias", "x_proj.weight", "D")),
        *((BambaMixer, "bamba", with_other(of)) for of in ("A_log", "dt_bias", "D", "norm.weight")),
    ],
)
def test_a_layer_that_computes_something_else_stays(kind: Any, name: str, change: Callable[[Any], None]) -> None:
    holder = layer(kind, name)
    change(holder.get_submodule("layer"))
    assert isinstance(fused(holder), kind)


def test_a_layer_that_does_not_norm_queries_and_keys_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_functions, "DELTA_RULE_NORM_EPS", None)
    assert isinstance(fused(layer(Qwen3_5GatedDeltaNet, "qwen3_5_text")), Qwen3_5GatedDeltaNet)


def test_a_layer_that_fails_as_it_was_read_stays() -> None:
    """Its parts have the names of a mixer's, and other shapes."""
    holder = layer(Lfm2ShortConv, "lfm2")
    holder.layer.in_proj = nn.Linear(holder.layer.in_proj.in_features, 2 * holder.layer.in_proj.in_features)
    assert isinstance(fused(holder.requires_grad_(False)), Lfm2ShortConv)


def test_a_layer_with_further_parts_stays() -> None:
    holder = layer(Lfm2ShortConv, "lfm2")
    holder.layer.extra = nn.Identity()
    assert isinstance(fused(holder), Lfm2ShortConv)

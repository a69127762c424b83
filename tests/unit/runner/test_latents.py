"""Attention whose heads share latents: what is in the cache, and which attention is taken for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from baton.engine.runner import KVLayout, LayerGeometry
from baton.errors import ConfigError
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.blocks.sub_blocks import Division, sub_block_rows
from baton.runner.model.attention import UnsupportedAttention
from baton.runner.model.latents import heads
from baton.runner.model.latents.heads import take_heads
from baton.runner.model.latents.indexer import Indexer
from baton.runner.model.latents.recognition import refuse_selections
from tests.doubles.fake_stages import FakeStages
from tests.support.listed_types import LISTED_TYPES
from tests.support.load_with import load_tiny, load_with
from tests.support.packed_runs import error, logits
from tests.support.varied_models import write_varied_model

LATENT, ROTATED, HEADS, PLAIN, VALUE = 32, 8, 4, 16, 16


def test_the_cache_has_one_latent_a_token_whatever_the_number_of_heads(tmp_path: Path) -> None:
    runner = load_tiny(tmp_path, "deepseek_v3")
    layer = runner.layout.layers[0]
    assert isinstance(layer, LayerGeometry)
    assert (layer.num_kv_heads, layer.widths) == (1, (layer.key_dim,))
    assert runner.layout.block_bytes == 3 * 16 * layer.key_dim * 4
    assert runner.layout.geometry == f"3*1x({layer.key_dim}>{layer.value_dim})"


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
@pytest.mark.parametrize("by_torch", [False, True])
def test_heads_have_the_same_bits_however_many_are_computed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, by_torch: bool
) -> None:
    """While the model is loaded, too. Where bits would depend on it, all heads are computed together."""
    write_varied_model(tmp_path, LISTED_TYPES[name], seed=1)
    how: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 64}
    if by_torch:
        how["operations"] = TorchOperations(1)
    together = logits(load_with(tmp_path, **how))
    monkeypatch.setattr(heads, "ROWS_AT_A_TIME", 1)
    monkeypatch.setattr(heads, "_FEWEST_HEADS", 3)
    assert np.array_equal(logits(load_with(tmp_path, **how)), together)


@pytest.mark.parametrize("narrow", ["int8", "fp8"])
@pytest.mark.parametrize(("name", "most"), [("deepseek_v3", 0.1), ("deepseek_v32", 0.7)])
def test_latents_in_8_bits_are_near_those_that_are_not(tmp_path: Path, name: str, most: float, narrow: str) -> None:
    """Where keys are selected, rounding decides between some; other numbers would differ by 1.4."""
    write_varied_model(tmp_path, LISTED_TYPES[name], seed=1)
    how = {"dtype": "float32", "num_blocks": 64}
    wide = load_with(tmp_path, **how)
    runner = load_with(tmp_path, cache_dtype=narrow, **how)
    assert runner.layout.block_bytes < 0.3 * wide.layout.block_bytes
    assert 0 < error(logits(runner), logits(wide)) < most


def test_weights_of_heads_may_be_quantised(tmp_path: Path) -> None:
    plain = load_tiny(tmp_path, "deepseek_v3")
    runner = load_tiny(tmp_path, "deepseek_v3", quantization="int8")
    assert runner.layout == plain.layout
    assert 0 < error(logits(runner), logits(plain)) < 0.1


def test_a_stage_can_not_begin_with_a_layer_that_takes_the_selection_of_another(tmp_path: Path) -> None:
    write_varied_model(tmp_path, LISTED_TYPES["glm_moe_dsa"], seed=1)
    how = {"dtype": "float32", "num_blocks": 64, "pipeline_parallel": 4, "start_stages": FakeStages.start}
    with pytest.raises(ConfigError, match="takes the selection of keys of a layer in another stage"):
        load_with(tmp_path, **how)


def test_an_indexer_that_computes_something_else_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_varied_model(tmp_path, LISTED_TYPES["deepseek_v32"], seed=1)
    monkeypatch.setattr(Indexer, "_turned", lambda _self, rows, _cos, _sin: rows)
    with pytest.raises(ConfigError, match="selects keys in another way"):
        load_with(tmp_path, dtype="float32", num_blocks=64)


def test_a_gpu_does_not_select_keys() -> None:
    module = nn.Module()
    module.attention = nn.Module()
    refuse_selections(module)
    module.attention.indexer = nn.Linear(1, 1)
    with pytest.raises(UnsupportedAttention, match="on CPUs alone"):
        refuse_selections(module)


@pytest.mark.parametrize(("dtype", "scales"), [("float32", 0), ("int8", 1)])
def test_a_part_of_a_block_has_the_keys_alone(dtype: str, scales: int) -> None:
    layout = KVLayout(16, (LayerGeometry(1, 40, 32, values_in_keys=True),) * 2, dtype)
    rows = sub_block_rows(layout, Division(parts=4))
    assert rows.num_bytes * 4 == layout.block_bytes
    assert len(rows.lengths) == 2 * (1 + scales)


class Attention(nn.Module):
    """This module makes keys and values as transformers' attention to latents does, and nothing else."""

    layer_idx = 0
    qk_rope_head_dim = ROTATED

    def __init__(self, bias: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (PLAIN + VALUE), bias=bias, dtype=torch.float32)
        self._factor = factor

    def expand_kv(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.kv_b_proj(latent).view(*latent.shape[:1], latent.shape[2], HEADS, -1).transpose(1, 2)
        keys = torch.cat((made[..., :PLAIN] * self._factor, rotated.expand(-1, HEADS, -1, -1)), dim=-1)
        return keys, made[..., PLAIN:]


@pytest.mark.parametrize(("changed", "is_taken"), [({}, True), ({"bias": True}, False), ({"factor": 1.5}, False)])
def test_only_keys_and_values_that_are_products_of_latents_are_replaced(
    changed: dict[str, Any], is_taken: bool
) -> None:
    attention, released = Attention(**changed), list[nn.Module]()
    layer = attention.kv_b_proj
    with torch.inference_mode():
        taken = take_heads(attention, TorchOperations(1), torch.Generator().manual_seed(0), released.append)
    assert (taken is not None) == is_taken
    assert released == ([layer] if is_taken else [])
    assert (attention.kv_b_proj is layer) != is_taken

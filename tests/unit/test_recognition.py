"""Parts of a model are replaced when they compute what ours do, and only then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.runner.fused_layers import FusedAttention, FusedMlp, FusedNorm
from baton.engine.runner.model_runner import TorchModelRunner, load_runner
from baton.engine.runner.random_model import write_random_model
from tests.support.tiny_models import TINY_MODELS

PARTS = (FusedAttention, FusedMlp, FusedNorm)


def loaded(tmp_path: Path, config: Mapping[str, Any], dtype: str = "float32") -> TorchModelRunner:
    write_random_model(tmp_path, config, seed=1)
    return load_runner(tmp_path, dtype=dtype, num_blocks=48)


def fused(runner: TorchModelRunner) -> tuple[int, ...]:
    """How many attentions, MLPs and norms outside of attention are ours."""
    counts = Counter(type(part) for part in runner._transformer._module.modules())
    return tuple(counts[part] for part in PARTS)


RECOGNISED = {
    "llama": ((3, 3, 7), True),
    "qwen2": ((3, 3, 7), True),
    "qwen3": ((3, 3, 7), True),
    "mistral": ((3, 3, 7), True),
    "phi3": ((3, 3, 7), True),
    "gpt_oss": ((3, 0, 7), True),
    "mixtral": ((3, 0, 7), True),
    "qwen3_moe": ((3, 0, 7), True),
    "gemma2": ((3, 3, 13), False),
    "gemma3_text": ((3, 3, 13), False),
    "deepseek_v3": ((0, 3, 13), False),
    "gpt2": ((0, 0, 0), False),
    "opt": ((0, 0, 0), False),
}
"""How many parts of each kind, and whether the loop over the layers is ours."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_what_is_recognised(tmp_path: Path, name: str, dtype: str) -> None:
    runner = loaded(tmp_path, TINY_MODELS[name], dtype)
    assert runner.model.bit_exact
    assert (fused(runner), runner._transformer.has_own_loop) == RECOGNISED[name]


@pytest.mark.parametrize("activation", ["relu", "gelu_new", "sigmoid"])
def test_another_activation_is_left_to_transformers(tmp_path: Path, activation: str) -> None:
    runner = loaded(tmp_path, {**TINY_MODELS["llama"], "hidden_act": activation})
    assert runner.model.bit_exact
    # gelu_new is the tanh approximation under another name.
    assert fused(runner) == (3, 3 if activation == "gelu_new" else 0, 7)


def test_attention_that_does_something_else_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def rotated_twice(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = original(*arguments)
        return query, original(key, key, *arguments[2:])[0]

    original = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated_twice)
    runner = loaded(tmp_path, TINY_MODELS["llama"], "bfloat16")
    assert runner.model.bit_exact
    assert fused(runner) == (0, 3, 7)


def test_a_loop_that_does_something_else_stays_transformers_own(tmp_path: Path) -> None:
    runner = loaded(tmp_path, {**TINY_MODELS["llama"], "model_type": "granite", "residual_multiplier": 0.5})
    assert runner.model.bit_exact
    assert fused(runner) == (3, 3, 7)
    assert not runner._transformer.has_own_loop


def test_mlps_with_biases_are_left_to_transformers(tmp_path: Path) -> None:
    runner = loaded(tmp_path, {**TINY_MODELS["llama"], "mlp_bias": True})
    assert fused(runner) == (3, 0, 7)

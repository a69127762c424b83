"""Requests with adapters on several ranks and stages have the bits of one process: logits, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from baton.errors import AdapterRefused
from baton.messages.sampling import SamplingParams
from baton.model_formats.adapters import open_adapter
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from tests.doubles.fake_rank_group import FakeRankGroup
from tests.doubles.fake_stages import FakeStages
from tests.oracle.test_ranks_exact import ALONE, Run, Shape, compute, loaded
from tests.support.adapter_files import PREFIX, expert_tensors, lora_tensors, write_adapter
from tests.support.listed_types import LISTED_TYPES
from tests.support.load_with import load_with
from tests.support.tiny_models import TINY_MODELS

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SIX_HEADS = {
    **TINY_MODELS["llama"],
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
"""Three ranks have unequally many columns of most products."""


def run_with(runner: TorchModelRunner, adapters: Sequence[Path]) -> Run:
    digests = [open_adapter(adapter).digest() for adapter in adapters]
    for adapter, digest in zip(adapters, digests, strict=True):
        runner.adapters.load(adapter, digest)
    return compute(runner, GREEDY, adapters=["", *digests])


def with_experts(directory: Path, modules: Mapping[str, tuple[int, int]]) -> Path:
    """An adapter of attention, experts and routers."""
    tensors = lora_tensors({name: shape for name, shape in modules.items() if "self_attn" in name}, 3, 1, 0.1)
    for layer in range(3):
        mlp = f"model.layers.{layer}.mlp"
        tensors |= expert_tensors(f"{mlp}.experts", [(256, 64), (64, 128)], 4, 3, seed=layer, scale=0.1)
        tensors |= lora_tensors({f"{mlp}.gate": (4, 64)}, 3, seed=layer, scale=0.1)
    parameters = ["mlp.experts.gate_up_proj", "experts.down_proj", "gate.weight"]
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return write_adapter(directory, tensors, 3, target_modules=targets, target_parameters=parameters)


@pytest.mark.parametrize(
    ("name", "config", "dtype", "shapes"),
    [
        ("llama", TINY_MODELS["llama"], "float32", [(2, 1), (2, 2)]),
        ("six_heads", SIX_HEADS, "bfloat16", [(3, 1)]),
        ("gpt2", TINY_MODELS["gpt2"], "bfloat16", [(2, 1)]),
        ("qwen3_next", LISTED_TYPES["qwen3_next"], "float32", [(2, 1)]),
        ("mixtral", TINY_MODELS["mixtral"], "float32", [(2, 1), (1, 2)]),
        ("deepseek_v3", TINY_MODELS["deepseek_v3"], "float32", [(2, 1)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bits_are_those_of_one_process(
    tmp_path: Path, name: str, config: dict[str, Any], dtype: str, shapes: Sequence[Shape]
) -> None:
    """Some requests have none, and the others one of two."""
    base = tmp_path / "base"
    write_random_model(base, config, seed=5)
    with loaded(base, ALONE, dtype=dtype) as alone:
        modules = alone.adaptable_modules
        adapters = [write_adapter(tmp_path / "all", lora_tensors(modules, 9, 9, scale=0.1), 9)]
        adapters += [with_experts(tmp_path / "experts", modules)] if name == "mixtral" else []
        expected = run_with(alone, adapters)
    for shape in shapes:
        with loaded(base, shape, dtype=dtype) as divided:
            assert divided.adaptable_modules == modules
            run_with(divided, adapters).check_equal(expected)


def test_hosts_of_two_ranks_each_have_the_bits_of_one_process(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_random_model(base, TINY_MODELS["llama"], seed=5)
    with loaded(base, ALONE, dtype="float32") as alone:
        adapters = [write_adapter(tmp_path / "all", lora_tensors(alone.adaptable_modules, 9, 9, scale=0.1), 9)]
        expected = run_with(alone, adapters)
    hosts = FakeStages(2, base, tensor_parallel=2)
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_blocks": 64, "tensor_parallel": 2}
    with closing(load_with(base, stages=hosts, start_ranks=FakeRankGroup, **settings)) as divided:
        run_with(divided, adapters).check_equal(expected)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
def test_vocabularies_are_adapted_and_base_weights_compared_where_they_are(tmp_path: Path, tied: bool) -> None:
    """Each rank has some rows of the embedding and of the head, and each stage one of both."""
    base = tmp_path / "base"
    write_random_model(base, {**TINY_MODELS["qwen2"], "tie_word_embeddings": tied}, seed=5)
    tensors: dict[str, Any] = lora_tensors({"lm_head": (256, 64)}, scale=0.1)
    random = np.random.default_rng(5)
    for part, shape in (("A", (4, 256)), ("B", (64, 4))):
        tensors[f"{PREFIX}model.embed_tokens.lora_embedding_{part}"] = random.standard_normal(shape, dtype=np.float32)
    weights = load_file(base / "model.safetensors")
    for module in ("model.embed_tokens", "lm_head"):
        own = weights.get(f"{module}.weight", weights["model.embed_tokens.weight"]).float().numpy().copy()
        tensors[f"{PREFIX}{module}.base_layer.weight"] = own
    adapter = write_adapter(tmp_path / "own", tensors, target_modules=["embed_tokens", "lm_head"])
    others = []
    for module, row in (("model.embed_tokens", 3), ("lm_head", 255)):
        changed = tensors[f"{PREFIX}{module}.base_layer.weight"].copy()
        changed[row, 7] += 1
        those = tensors | {f"{PREFIX}{module}.base_layer.weight": changed}
        others.append(write_adapter(tmp_path / module, those, target_modules=["embed_tokens", "lm_head"]))
    with loaded(base, ALONE, dtype="float32") as alone:
        expected = run_with(alone, [adapter])
    for shape in ((2, 1), (1, 2)):
        with loaded(base, shape, dtype="float32") as divided:
            for other in others:
                with pytest.raises(AdapterRefused, match="this model's is another one"):
                    divided.adapters.load(other, open_adapter(other).digest())
            run_with(divided, [adapter]).check_equal(expected)

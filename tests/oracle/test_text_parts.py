"""The text part of models with other parts computes what transformers' whole model computes of a text alone."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.cli.cluster.supervisor.preflight import check_architecture
from baton.engine.request import Request
from baton.errors import AdapterRefused, ConfigError
from baton.messages.node_model import Capability
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.model_formats.adapters import open_adapter
from baton.runner.against_transformers import eager_logits
from baton.runner.loading import load_runner
from baton.runner.model import attention
from baton.runner.model.checkpoint import open_checkpoint
from baton.runner.model.mixtures import experts
from baton.runner.model.random_model import write_random_model
from baton.runner.model.weights import load_model, parameter_shapes
from baton.runner.spec import TorchSpec, WeightSpec
from tests.doubles.fake_rank_group import FakeRankGroup
from tests.doubles.fake_stages import FakeStages
from tests.oracle.test_token_exact import BLOCK_SIZE, NEW_TOKENS, generate_with, make_engine, run_all
from tests.support.peft_adapters import load_with_adapter, write_peft_adapter
from tests.support.quantized_models import FP8_FORMATS, PACKED_FORMATS, write_quantized_model
from tests.support.text_part_models import REFUSED, TEXT_PART_MODELS
from tests.support.varied_models import write_varied_model

KIND = "AutoModelForMultimodalLM"
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
PROMPTS = {f"prompt-{length}": Random(length).choices(range(256), k=length) for length in (1, 5, 16, 33, 70, 150)}
"""Shorter and longer than the windows, and in several chunks."""
OTHER_PARTS = ("vision", "visual", "audio", "projector", "merger")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    attention.register()
    experts.register()
    return tmp_path_factory.mktemp("models")


def written(models: Path, name: str) -> Path:
    if not (models / name).exists():
        write_varied_model(models / name, TEXT_PART_MODELS[name], seed=5)
    return models / name


def tokens_of(directory: Path, **settings: Any) -> dict[str, list[int]]:
    spec = TorchSpec(directory, **{"dtype": "float32", "block_size": BLOCK_SIZE, "num_blocks": 96, **settings})
    runner = load_runner(spec, start_ranks=FakeRankGroup, start_stages=FakeStages.start)
    with closing(runner):
        assert runner.model.bit_exact, runner.model.bit_exact_reason
        requests = [Request(key, RequestSpec(prompt, GREEDY)) for key, prompt in PROMPTS.items()]
        return run_all(make_engine(runner), requests)


@pytest.mark.parametrize("name", TEXT_PART_MODELS)
def test_greedy_tokens_and_logits_are_those_of_the_whole_model(models: Path, name: str) -> None:
    directory = written(models, name)
    found = tokens_of(directory)
    whole = load_with_adapter(directory, None, KIND)
    assert found == generate_with(whole, PROMPTS)
    assert len({token for tokens in found.values() for token in tokens}) > 12
    # Greedy tokens don't tell whether logits are capped or scaled. The check at start compares Baton's with these.
    loaded, prompt = load_model(directory, WeightSpec("float32")), PROMPTS["prompt-33"]
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        expected = whole(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].numpy()
    exact = eager_logits(loaded, prompt, noise=0.0, num_noisy=1).exact
    assert np.abs(exact - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemma3", {"dtype": "bfloat16", "tensor_parallel": 2, "pipeline_parallel": 2}),
        ("gemma4", {"tensor_parallel": 2}),
        ("qwen3_vl", {"dtype": "bfloat16", "tensor_parallel": 2, "pipeline_parallel": 2}),
        ("ernie4_5_vl_moe", {"dtype": "bfloat16", "tensor_parallel": 2, "pipeline_parallel": 2}),
        ("kimi_k25", {"quantization": "int4", "tensor_parallel": 2}),
        ("glm4v_moe", {"quantization": "int8", "pipeline_parallel": 2}),
        ("qwen3_5_moe", {"dtype": "bfloat16", "tensor_parallel": 2}),
    ],
)
def test_ranks_and_stages_have_the_tokens_of_one_process(models: Path, name: str, settings: dict[str, Any]) -> None:
    alone = {key: value for key, value in settings.items() if not key.endswith("parallel")}
    assert tokens_of(written(models, name), **settings) == tokens_of(written(models, name), **alone)


@pytest.mark.parametrize("name", ["gemma3", "gemma4+mixture", "qwen3_vl"])
def test_weights_of_other_parts_are_neither_needed_nor_loaded(models: Path, tmp_path: Path, name: str) -> None:
    directory = written(models, name)
    loaded = load_model(directory, WeightSpec("float32"))
    shapes, _ = parameter_shapes(open_checkpoint(directory))
    assert not [key for key in shapes if any(part in key for part in OTHER_PARTS)]
    assert loaded.weights.num_bytes == 4 * sum(int(np.prod(shape)) for shape in shapes.values())

    tensors = load_file(directory / "model.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if not any(part in key for part in OTHER_PARTS)}
    assert len(kept) < len(tensors)
    # Numbers that can't be used without their scales, of shapes that don't fit.
    others = {key: torch.ones(3).to(torch.float8_e4m3fn) for key in tensors.keys() - kept.keys()}
    expected = tokens_of(directory)
    for content in (kept, kept | others):
        save_file(content, tmp_path / "model.safetensors", metadata={"format": "pt"})
        for file in ("config.json", "tokenizer.json"):
            (tmp_path / file).write_bytes((directory / file).read_bytes())
        assert tokens_of(tmp_path) == expected


def test_a_tensor_that_the_text_lacks_is_named(models: Path, tmp_path: Path) -> None:
    directory = written(models, "mistral3")
    tensors = load_file(directory / "model.safetensors")
    del tensors[next(key for key in tensors if key.endswith("layers.2.self_attn.q_proj.weight") and "language" in key)]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(
        ConfigError, match=r"lack 1 tensors .* first model\.language_model\.layers\.2\.self_attn\.q_proj"
    ):
        load_model(tmp_path, WeightSpec("float32"))


@pytest.mark.parametrize("name", ["gptq-int4-asymmetric", "ct-int8-rows", "fp8-block"])
def test_quantised_checkpoints_mean_the_same_numbers(tmp_path: Path, name: str) -> None:
    form = {**PACKED_FORMATS, **FP8_FORMATS}[name]
    directory = tmp_path / "quantised"
    twin = write_quantized_model(directory, TEXT_PART_MODELS["mistral3"], form)
    assert tokens_of(directory, dequantize=True) == tokens_of(twin)
    assert tokens_of(directory, tensor_parallel=2) == tokens_of(directory)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_tokens_with_an_adapter_of_the_whole_model_are_those_of_peft(models: Path, tmp_path: Path, name: str) -> None:
    base = written(models, name)
    targets = r".*language_model.*\.(q_proj|v_proj|down_proj)"
    write_peft_adapter(base, tmp_path, 1, KIND, r=4, lora_alpha=8, target_modules=targets)
    runner = load_runner(TorchSpec(base, dtype="float32", block_size=BLOCK_SIZE, num_blocks=96))
    digest = open_adapter(tmp_path).digest()
    runner.adapters.load(tmp_path, digest)
    requests = [Request(key, RequestSpec(prompt, GREEDY, adapter=digest)) for key, prompt in PROMPTS.items()]
    found = run_all(make_engine(runner), requests)
    assert found == generate_with(load_with_adapter(base, tmp_path, KIND), PROMPTS)
    assert found != generate_with(load_with_adapter(base, None, KIND), PROMPTS)


def test_an_adapter_of_a_part_that_is_left_out_is_refused(models: Path, tmp_path: Path) -> None:
    base = written(models, "gemma3")
    write_peft_adapter(base, tmp_path, 1, KIND, r=4, lora_alpha=8, target_modules=r".*vision_tower.*\.q_proj")
    runner = load_runner(TorchSpec(base, dtype="float32", num_blocks=16))
    with pytest.raises(AdapterRefused, match="vision_tower"):
        runner.adapters.load(tmp_path, open_adapter(tmp_path).digest())


def test_operators_are_told_which_parts_are_left_out(models: Path) -> None:
    directory = written(models, "gemma4+mixture")
    check_architecture(directory, json.loads((directory / "config.json").read_text()))
    runner = load_runner(TorchSpec(directory, dtype="float32", num_blocks=16))
    assert Capability.IMAGE not in runner.model.capabilities
    runs = {path.part: path.runs for path in runner.model.compute_paths}["other parts"]
    assert runs.startswith("left out, the text alone is served: model.vision_tower, model.audio_tower")


@pytest.mark.parametrize("name", REFUSED)
def test_a_text_part_that_is_not_served_is_named(tmp_path: Path, name: str) -> None:
    config, words = REFUSED[name]
    write_random_model(tmp_path, config, seed=5)
    with pytest.raises(ConfigError, match=words):
        load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=16))


def test_each_size_of_a_list_of_experts_is_checked(models: Path, tmp_path: Path) -> None:
    directory = written(models, "ernie4_5_vl_moe")
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = [64, 0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="has moe_intermediate_size 0"):
        load_model(tmp_path, WeightSpec("float32"))


def test_a_head_for_labels_is_refused(models: Path, tmp_path: Path) -> None:
    directory = written(models, "gemma3")
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["Gemma3ForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="it has a head for labels"):
        load_model(tmp_path, WeightSpec("float32"))

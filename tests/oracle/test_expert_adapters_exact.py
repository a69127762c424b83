"""Greedy tokens with adapters of experts and of their router equal those of PEFT on transformers in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.engine.request import Request
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.model_formats.adapters import open_adapter
from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.spec import TorchSpec
from tests.oracle.test_token_exact import BLOCK_SIZE, make_engine, make_prompts, run_all
from tests.support.adapter_files import lora_tensors, write_adapter
from tests.support.layer_number_models import GEMMA4_MODELS
from tests.support.listed_types import LISTED_TYPES
from tests.support.peft_adapters import generate_with_peft, write_peft_adapter
from tests.support.tiny_models import TINY_MODELS
from tests.support.varied_models import write_varied_model

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
BOTH: Mapping[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": [DOWN, GATE_UP]}
NEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


def assert_tokens_are_those_of_peft(base: Path, adapters: Sequence[Path], operations: Operations | None = None) -> None:
    """Compute all prompts with each adapter and without any, all beside each other."""
    runner = load_runner(TorchSpec(base, dtype="float32", block_size=BLOCK_SIZE, num_blocks=96), operations=operations)
    digests = [open_adapter(adapter).digest() for adapter in adapters]
    for adapter, digest in zip(adapters, digests, strict=True):
        runner.adapters.load(adapter, digest)
    made = make_prompts(runner.model.vocab_size)
    prompts = {name: made[name] for name in ("prompt-1", "prompt-17", "prompt-33")}
    expected: dict[str, list[int]] = {}
    every = list(enumerate(["", *digests]))
    for index, digest in every:
        of_one = generate_with_peft(base, adapters[index - 1] if digest else None, prompts, NEW_TOKENS)
        expected |= {f"{key}-{index}": tokens for key, tokens in of_one.items()}
    requests = [
        Request(f"{key}-{index}", RequestSpec(prompt, GREEDY, cache_salt=digest, adapter=digest))
        for key, prompt in prompts.items()
        for index, digest in every
    ]
    assert run_all(make_engine(runner), requests) == expected
    for index, digest in every[1:]:
        runner.adapters.load(adapters[index - 1], digest)
        alone = Request("prompt-17", RequestSpec(prompts["prompt-17"], GREEDY, cache_salt=digest, adapter=digest))
        assert run_all(make_engine(runner), [alone]) == {"prompt-17": expected[f"prompt-17-{index}"]}
        differ = [key for key in prompts if expected[f"{key}-0"] != expected[f"{key}-{index}"]]
        assert len(differ) > len(prompts) / 2, f"adapter {index} changes nothing"


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_greedy_tokens_equal_those_of_peft(tmp_path: Path, name: str) -> None:
    base = tmp_path / "base"
    write_random_model(base, TINY_MODELS[name], seed=5)
    router = "router" if name == "gpt_oss" else "gate"
    write_peft_adapter(base, tmp_path / "experts", seed=1, **BOTH)
    write_peft_adapter(
        base,
        tmp_path / "more",
        seed=2,
        r=3,
        lora_alpha=6,
        use_rslora=True,
        rank_pattern={"experts.down_proj": 5, f"1.mlp.{router}.weight": 2},
        alpha_pattern={"gate_up_proj": 4},
        target_modules=["o_proj"],
        target_parameters=[GATE_UP, DOWN, f"mlp.{router}.weight"],
    )
    write_peft_adapter(base, tmp_path / "down", seed=3, **{**BOTH, "target_parameters": ["experts.down_proj"]})
    assert_tokens_are_those_of_peft(base, [tmp_path / "experts", tmp_path / "more", tmp_path / "down"])


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("llama4_text", "feed_forward.experts.gate_up_proj"),  # rows are weighted before
        ("longcat_flash", "mlp.experts.gate_up_proj"),  # some of these experts are never used
        ("nemotron_h", "mixer.experts.up_proj"),  # without gates
    ],
)
def test_adapters_of_experts_of_other_kinds_equal_those_of_peft(tmp_path: Path, name: str, path: str) -> None:
    base, (mixture, _, up) = tmp_path / "base", path.partition(".")
    write_varied_model(base, LISTED_TYPES[name], seed=5)
    both = [path, f"{mixture}.experts.down_proj"]
    write_peft_adapter(base, tmp_path / "both", seed=1, **{**BOTH, "target_parameters": both})
    write_peft_adapter(base, tmp_path / "up", seed=2, **{**BOTH, "r": 3, "target_parameters": [up]})
    assert_tokens_are_those_of_peft(base, [tmp_path / "both", tmp_path / "up"])


def test_adapters_of_a_router_beside_its_experts_equal_those_of_peft(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_varied_model(base, GEMMA4_MODELS["mixture"], seed=5)
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    write_peft_adapter(base, tmp_path / "experts", seed=1, **{**BOTH, "target_parameters": experts})
    write_peft_adapter(base, tmp_path / "router", seed=2, r=4, lora_alpha=8, target_modules=["proj"])
    assert_tokens_are_those_of_peft(base, [tmp_path / "experts", tmp_path / "router"])


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_greedy_tokens_equal_those_of_peft_without_kernels(tmp_path: Path, name: str) -> None:
    base = tmp_path / "base"
    write_random_model(base, TINY_MODELS[name], seed=5)
    write_peft_adapter(base, tmp_path / "experts", seed=1, **BOTH)
    assert_tokens_are_those_of_peft(base, [tmp_path / "experts"], TorchOperations(1))


@pytest.mark.parametrize(
    ("name", "block", "projections"),
    [("mixtral", "block_sparse_moe", ("w1", "w3", "w2")), ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj"))],
)
def test_adapters_with_a_layer_for_each_expert_equal_those_of_peft(
    tmp_path: Path, name: str, block: str, projections: tuple[str, str, str]
) -> None:
    base = tmp_path / "base"
    write_random_model(base, TINY_MODELS[name], seed=5)
    inner = 128 if name == "mixtral" else 64
    modules = {
        f"model.layers.{layer}.{block}.experts.{expert}.{projection}": (64, inner) if is_down else (inner, 64)
        for layer in range(3)
        for expert in range(4)
        for projection, is_down in zip(projections, (False, False, True), strict=True)
    }
    modules |= {f"model.layers.{layer}.{block}.gate": (4, 64) for layer in range(3)}
    tensors = lora_tensors(modules, rank=4, seed=1, scale=0.1)
    write_adapter(tmp_path / "old", tensors, task_type="CAUSAL_LM")
    assert_tokens_are_those_of_peft(base, [tmp_path / "old"])


def test_an_adapter_of_some_experts_is_the_one_with_zeros_for_the_others(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_random_model(base, TINY_MODELS["qwen3_moe"], seed=5)
    names = {f"model.layers.{layer}.mlp.experts.{expert}.down_proj": (64, 64) for layer in (0, 2) for expert in (1, 3)}
    some = lora_tensors(names, seed=1, scale=0.4)
    every = {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.down_proj.lora_{part}.weight": np.zeros(
            (4, 64) if part == "A" else (64, 4), np.float32
        )
        for layer in range(3)
        for expert in range(4)
        for part in "AB"
    }
    write_adapter(tmp_path / "some", some)
    write_adapter(tmp_path / "every", {**every, **some})
    runner = load_runner(TorchSpec(base, dtype="float32", block_size=BLOCK_SIZE, num_blocks=96))
    found = []
    for adapter in ("some", "every"):
        digest = open_adapter(tmp_path / adapter).digest()
        runner.adapters.load(tmp_path / adapter, digest)
        request = Request("a", RequestSpec([5, 6, 7, 8], GREEDY, cache_salt=digest, adapter=digest))
        found.append(run_all(make_engine(runner), [request]))
    without = run_all(make_engine(runner), [Request("a", RequestSpec([5, 6, 7, 8], GREEDY))])
    assert found[0] == found[1] != without

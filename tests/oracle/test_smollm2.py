"""SmolLM2-135M-Instruct out of its package: its answers, and those of transformers with the same weights.

With its weights made plain the runner's greedy answers are those of transformers, token by token. With the integers of
its file, the inputs of products are rounded, and the logits differ by that.

The model is fetched and converted once into the cache of whoever runs the tests, as `baton up --model smollm2` does.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.request import Request
from baton.errors import ConfigError
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.models.resolve import find_model
from baton.runner.loading import load_runner
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from baton.text.model_template import ModelTemplate
from baton.text.tokenizer import Tokenizer
from tests.doubles.fake_workers import FakeWorkers
from tests.oracle.test_token_exact import make_engine
from tests.support.packed_runs import error, logits

MAX_TOKENS = 12
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Translate 'good morning' into Spanish.",
)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    try:
        found = find_model(Path("smollm2"), os.environ)
    except ConfigError as error:
        pytest.skip(str(error))
    return found.directory


def rendered(model_dir: Path) -> dict[str, list[int]]:
    template, tokenizer = ModelTemplate.load(model_dir, FakeWorkers()), Tokenizer.load(model_dir)
    now = datetime.now(UTC)
    return {
        question: tokenizer.encode_rendered(template.render([{"role": "user", "content": question}], now))
        for question in QUESTIONS
    }


def test_prompts_are_those_of_transformers(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    for question, ids in rendered(model_dir).items():
        message = [{"role": "user", "content": question}]
        assert theirs.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"] == ids


def written_plain(model_dir: Path, directory: Path) -> Path:
    """The model in transformers' own form: each weight as the float32 numbers that its blocks mean."""
    plain = {}
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        layer, _, kind = name.rpartition(".")
        if tensor.dtype == torch.uint8:
            values = gguf.quants.dequantize(tensor.numpy(), gguf.GGMLQuantizationType[kind.upper()])
            plain[f"{layer}.weight"] = torch.from_numpy(values)
        else:
            plain[name] = tensor
    save_file(plain, directory / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(model_dir / "generation_config.json", directory)
    config = json.loads((model_dir / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def answers(runner: TorchModelRunner, prompts: Mapping[str, list[int]]) -> dict[str, list[int]]:
    engine = make_engine(runner)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop_token_ids=runner.model.eos_token_ids)
    tokens: dict[str, list[int]] = {question: [] for question in prompts}
    for question, prompt in prompts.items():
        engine.scheduler.add_request(Request(question, RequestSpec(prompt, params)))
    while engine.has_work():
        for outputs in engine.step().values():
            for output in outputs:
                tokens[output.attempt.request_id].extend(output.new_token_ids)
    return tokens


@pytest.fixture(scope="module")
def dequantized(model_dir: Path) -> TorchModelRunner:
    return load_runner(TorchSpec(model_dir, dtype="float32", block_size=16, num_blocks=128, dequantize=True))


@pytest.mark.timeout(600)
def test_greedy_answers_equal_generate(model_dir: Path, dequantized: TorchModelRunner, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompts = rendered(model_dir)
    module = AutoModelForCausalLM.from_pretrained(
        written_plain(model_dir, tmp_path), dtype=torch.float32, local_files_only=True
    ).eval()
    expected = {}
    for question, prompt in prompts.items():
        ids = torch.tensor([prompt])
        out = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
        )
        expected[question] = out[0, len(prompt) :].tolist()
    del module
    assert "Paris" in Tokenizer.load(model_dir).decode(expected[QUESTIONS[0]])
    assert answers(dequantized, prompts) == expected
    assert dequantized.model.bit_exact


def test_integers_of_the_file_change_the_logits_by_the_rounding_of_inputs(
    model_dir: Path, dequantized: TorchModelRunner
) -> None:
    kept = load_runner(TorchSpec(model_dir, dtype="float32", num_blocks=64))
    assert kept.model.compute_paths[0].runs == "Q4_1, Q8_0 (GGUF), 5.74 bits a weight, 92 MiB"
    assert kept.model.bit_exact
    assert 0 < error(logits(kept), logits(dequantized)) < 0.2

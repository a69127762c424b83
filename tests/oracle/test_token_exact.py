"""Tokens of the engine equal transformers' own `generate()` in float32, also beyond the positions that a configuration
names; test_types.py has all types."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random
from typing import Any

import torch

from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.messages.node import Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_clock import FakeClock
from tests.support.tiny_models import TINY_MODELS

BLOCK_SIZE = 16
NEW_TOKENS = 12
PROMPT_LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 5, 33, 70, 100)
"""Prompts that run at once: with 24 tokens a step the long ones take several chunks beside decoding requests."""


def make_engine(runner: TorchModelRunner, **limits: Any) -> EngineCore:
    usual: dict[str, Any] = {
        "num_blocks": runner.memory.num_blocks,
        "block_size": runner.layout.block_size,
        "windows": runner.layout.windows,
        "keeps_states": runner.layout.keeps_states,
        "long_sequences": runner.model.long_sequences,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 8,
        "max_model_len": runner.model.max_model_len,
    }
    fields = CacheKeyFields(runner.model.fingerprint, runner.layout.dtype, "test")
    return EngineCore(Scheduler(SchedulerConfig(**usual | limits), fields, FakeClock()), runner)


def run_all(engine: EngineCore, requests: list[Request]) -> dict[str, list[int]]:
    """Run steps until all requests have ended; each must end by its length."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    reasons: dict[str, Outcome] = {}
    for request in requests:
        engine.scheduler.add_request(request)
    while engine.has_work():
        for outputs in engine.step().values():
            for output in outputs:
                tokens[output.attempt.request_id].extend(output.new_token_ids)
                if output.outcome is not None:
                    reasons[output.attempt.request_id] = output.outcome
    assert set(reasons.values()) == {Outcome.LENGTH}
    assert set(reasons) == set(tokens)
    return tokens


def make_prompts(vocab_size: int) -> dict[str, list[int]]:
    rng = Random(11)
    return {f"prompt-{n}": [rng.randrange(vocab_size) for _ in range(n)] for n in PROMPT_LENGTHS}


_generated: dict[tuple[bytes, str], dict[str, list[int]]] = {}
"""What `generate_with_transformers` has returned, by a digest of the model's files, and by the prompts and the
number of tokens."""


def generate_with_transformers(
    directory: Path, prompts: dict[str, list[int]], new_tokens: int = NEW_TOKENS
) -> dict[str, list[int]]:
    """The greedy tokens of transformers for each prompt, computed once for equal models and prompts."""
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        digest.update((directory / name).read_bytes())
    key = digest.digest(), json.dumps([prompts, new_tokens])
    if key not in _generated:
        _generated[key] = _generate(directory, prompts, new_tokens)
    return {name: [*tokens] for name, tokens in _generated[key].items()}


def _generate(directory: Path, prompts: dict[str, list[int]], new_tokens: int) -> dict[str, list[int]]:
    from transformers import AutoModelForCausalLM

    # What transformers 5.17 would choose leaves soft caps out.
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    ).eval()
    return generate_with(model, prompts, new_tokens)


def generate_with(model: Any, prompts: dict[str, list[int]], new_tokens: int = NEW_TOKENS) -> dict[str, list[int]]:
    """The greedy tokens of a transformers model for each prompt."""
    expected = {}
    for name, prompt in prompts.items():
        ids = torch.tensor([prompt])
        # Without a mask generate() would take prompt tokens equal to the pad token for padding.
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected[name] = out[0, len(prompt) :].tolist()
    return expected


def test_a_yarn_reaches_beyond_the_positions_that_a_configuration_names(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    config = {**TINY_MODELS["qwen2"], "max_position_embeddings": 64, "rope_parameters": yarn}
    write_random_model(tmp_path, config, seed=5)
    runner = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=BLOCK_SIZE, num_blocks=64))
    assert runner.model.max_model_len == 256
    prompts = {name: tokens for name, tokens in make_prompts(runner.model.vocab_size).items() if len(tokens) > 50}
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    found = run_all(make_engine(runner), [Request(key, RequestSpec(prompt, greedy)) for key, prompt in prompts.items()])
    assert found == generate_with_transformers(tmp_path, prompts)


def test_preempted_requests_continue_with_the_same_tokens(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen2"], seed=5)
    roomy = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=BLOCK_SIZE, num_blocks=64))
    cramped = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=BLOCK_SIZE, num_blocks=11))
    prompts = {f"p{i}": [(i * 31 + j * 7) % 256 for j in range(20)] for i in range(5)}

    def requests() -> list[Request]:
        drawn = [SamplingParams(temperature=0.8, seed=i, max_tokens=40, repetition_penalty=1.2) for i in range(5)]
        return [
            Request(key, RequestSpec(prompt, params))
            for (key, prompt), params in zip(prompts.items(), drawn, strict=True)
        ]

    engine = make_engine(cramped)
    tokens = run_all(engine, requests())
    assert engine.scheduler.make_stats().num_preemptions > 0
    assert tokens == run_all(make_engine(roomy), requests())

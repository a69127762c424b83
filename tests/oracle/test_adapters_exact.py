"""Greedy tokens with adapters equal those of PEFT on transformers in float32, for every supported architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.request import Request
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.model_formats.adapters import open_adapter
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.oracle.test_token_exact import BLOCK_SIZE, make_engine, make_prompts, run_all
from tests.support.peft_adapters import SETTINGS, generate_with_peft, write_peft_adapter
from tests.support.tiny_models import TINY_MODELS

TARGETS = {
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
"""What adapters change in models whose experts PEFT would change, too."""
BOTH = ("llama", "gemma3_text", "mixtral", "deepseek_v3", "gpt2")
"""The models to which an adapter of each kind of SETTINGS is applied, side by side; the others have one."""
LENGTHS = (1, 17, 33)
NEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


def prompts_of(runner: TorchModelRunner) -> dict[str, list[int]]:
    every = make_prompts(runner.model.vocab_size)
    return {f"prompt-{length}": every[f"prompt-{length}"] for length in LENGTHS}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_greedy_tokens_equal_those_of_peft(tmp_path: Path, name: str) -> None:
    base = tmp_path / "base"
    write_random_model(base, TINY_MODELS[name], seed=5)
    place = list(TINY_MODELS).index(name) % len(SETTINGS)
    chosen = SETTINGS if name in BOTH else SETTINGS[place : place + 1]
    for index, settings in enumerate(chosen):
        targets = TARGETS.get(name, "all-linear")
        write_peft_adapter(base, tmp_path / f"{index}", seed=index, target_modules=targets, **settings)
    runner = load_runner(TorchSpec(base, dtype="float32", block_size=BLOCK_SIZE, num_blocks=96))
    digests = [open_adapter(tmp_path / f"{index}").digest() for index in range(len(chosen))]
    for index, digest in enumerate(digests):
        runner.adapters.load(tmp_path / f"{index}", digest)
    prompts = prompts_of(runner)
    expected: dict[str, list[int]] = {}
    for index, digest in enumerate(["", *digests]):
        of_one = generate_with_peft(base, tmp_path / f"{index - 1}" if digest else None, prompts, NEW_TOKENS)
        expected |= {f"{key}-{index}": tokens for key, tokens in of_one.items()}
    requests = [
        Request(f"{key}-{index}", RequestSpec(prompt, GREEDY, cache_salt=digest, adapter=digest))
        for key, prompt in prompts.items()
        for index, digest in enumerate(["", *digests])
    ]
    assert run_all(make_engine(runner), requests) == expected
    every = range(len(digests))
    differ = [key for key in prompts if all(expected[f"{key}-{one}"] != expected[f"{key}-{one + 1}"] for one in every)]
    assert len(differ) > len(prompts) / 2


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3_text", "opt"])
def test_vocabulary_adapters_equal_those_of_peft(tmp_path: Path, name: str) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_random_model(base, TINY_MODELS[name], seed=5)
    targets = ["embed_tokens", "q_proj"] if name == "opt" else ["embed_tokens", "lm_head", "q_proj"]
    write_peft_adapter(base, adapter, seed=1, r=4, lora_alpha=8, target_modules=targets)
    runner = load_runner(TorchSpec(base, dtype="float32", block_size=BLOCK_SIZE, num_blocks=96))
    digest = open_adapter(adapter).digest()
    runner.adapters.load(adapter, digest)
    prompts = prompts_of(runner)
    expected = generate_with_peft(base, adapter, prompts, NEW_TOKENS)
    without = generate_with_peft(base, None, prompts, NEW_TOKENS)
    requests = [
        Request(key, RequestSpec(prompt, GREEDY, cache_salt="with", adapter=digest)) for key, prompt in prompts.items()
    ]
    requests += [Request(f"{key}-without", RequestSpec(prompt, GREEDY)) for key, prompt in prompts.items()]
    assert run_all(make_engine(runner), requests) == expected | {f"{key}-without": of for key, of in without.items()}
    assert expected != without


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_cached_preempted_and_forked_requests_keep_the_tokens_of_peft(tmp_path: Path, mode: str) -> None:
    base = tmp_path / "base"
    write_random_model(base, TINY_MODELS["qwen2"], seed=5)
    cramped = load_runner(
        TorchSpec(base, dtype="float32", block_size=BLOCK_SIZE, num_blocks=13, host_cache_bytes=1 << 20)
    )
    prompts = dict(list(make_prompts(cramped.model.vocab_size).items())[:6])
    requests: list[tuple[str, list[int], str]] = []
    expected: dict[str, list[int]] = {}
    for index, settings in enumerate((None, *SETTINGS)):
        adapter, digest = tmp_path / f"{index}", ""
        if settings is not None:
            write_peft_adapter(base, adapter, seed=index, target_modules="all-linear", **settings)
            digest = open_adapter(adapter).digest()
            cramped.adapters.load(adapter, digest)
        of_one = generate_with_peft(base, adapter if digest else None, prompts, NEW_TOKENS)
        expected |= {f"{key}-{index}": tokens for key, tokens in of_one.items()}
        requests += [(f"{key}-{index}", prompt, digest) for key, prompt in prompts.items()]

    engine = make_engine(cramped, preemption_mode=mode, num_host_blocks=cramped.num_host_blocks)
    for turn in ("", "-again"):
        found = run_all(
            engine,
            [Request(f"{key}{turn}", RequestSpec(prompt, GREEDY, adapter=digest)) for key, prompt, digest in requests],
        )
        assert {key.removesuffix("-again"): tokens for key, tokens in found.items()} == expected
    stats = engine.scheduler.make_stats()
    assert stats.num_preemptions_by_mode[mode] > 0
    assert sum(stats.prefix_cache.num_hit_tokens.values()) > 0

    two = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, n=2)
    tokens: dict[tuple[str, int], list[int]] = {}
    for key, prompt, digest in requests[-2:]:
        engine.scheduler.add_request(Request(key, RequestSpec(prompt, two, adapter=digest)))
    while engine.has_work():
        for outputs in engine.step().values():
            for output in outputs:
                tokens.setdefault((output.attempt.request_id, output.sequence_index), []).extend(output.new_token_ids)
    assert sorted(tokens.values()) == sorted(expected[key] for key, *_ in requests[-2:] for _ in range(2))

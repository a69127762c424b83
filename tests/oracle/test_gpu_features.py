"""On a GPU: log-probabilities of prompts, drafts, offline use, and KV that another process reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import baton
from baton import LLM
from baton import SamplingParams as OfflineParams
from baton.engine.request import Request
from baton.messages.generation import GenerateRequest
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.messages.speculation import SpeculationConfig
from baton.runner import DraftSpec
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.oracle.test_speculation_exact import PROMPTS as SPECULATION_PROMPTS
from tests.oracle.test_speculation_exact import Result, generate
from tests.oracle.test_token_exact import make_engine, run_all
from tests.support.process_cluster import process_cluster
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_models import TINY_MODELS

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(300),
]

DEMO_MODEL = Path(baton.__file__).parent / "demo_model"
RNG = Random(4)
PROMPTS = {f"of-{length}": [RNG.randrange(256) for _ in range(length)] for length in (1, 2, 17, 70, 300)}
CHUNKS = {"of-17": [1, 7, 9], "of-70": [16, 1, 30, 22, 1], "of-2": [1, 1], "of-300": [130, 1, 169]}


def prompt_logprobs(
    runner: TorchModelRunner, prompts: Mapping[str, Sequence[int]], chunks: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Sequence[TokenLogprobs]]:
    """What the runner returns for these prompts, computed together, in these chunks."""
    driver = RunnerDriver(runner)
    for name, prompt in prompts.items():
        driver.add(name, prompt, SamplingParams(temperature=0.0, prompt_logprobs=3, max_tokens=2))
    plan = {name: list(sizes) for name, sizes in (chunks or {}).items()}
    found: dict[str, Sequence[TokenLogprobs]] = {}
    while counts := {
        name: plan[name].pop(0) if plan.get(name) else one.num_tokens - one.num_computed
        for name, one in driver.requests.items()
        if len(one.output) < 2
    }:
        out = driver.step(counts)
        assert not out.failed
        found |= out.prompt_logprobs
    assert found.keys() == prompts.keys()
    return found


WIDE: Mapping[str, Any] = {
    **TINY_MODELS["qwen3"],
    "hidden_size": 896,
    "intermediate_size": 2432,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "initializer_range": 0.04,
}
"""Norms of the other models are so narrow that torch, too, adds their squares in one order."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text", "gpt2", "wide"])
def test_log_probabilities_of_prompts(tmp_path: Path, architecture: str, dtype: str) -> None:
    write_random_model(tmp_path, WIDE if architecture == "wide" else TINY_MODELS[architecture], 6)
    runner = load_runner(TorchSpec(tmp_path, dtype=dtype, num_blocks=160, device=DEVICE))
    assert runner.model.bit_exact
    together = prompt_logprobs(runner, PROMPTS)
    assert prompt_logprobs(runner, PROMPTS, CHUNKS) == together
    for name, prompt in PROMPTS.items():
        assert prompt_logprobs(runner, {name: prompt}) == {name: together[name]}
    if dtype == "float32":
        on_cpu = prompt_logprobs(load_runner(TorchSpec(tmp_path, dtype=dtype, num_blocks=160)), PROMPTS)
        for name, positions in together.items():
            assert [one.token_id for one in positions] == PROMPTS[name][1:]
            for one, other in zip(positions, on_cpu[name], strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
                assert [top for _, top in one.top] == pytest.approx([top for _, top in other.top], abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3_moe", "gpt_oss"])
def test_speculation_changes_no_bit(tmp_path: Path, architecture: str, dtype: str) -> None:
    write_random_model(tmp_path / "model", TINY_MODELS[architecture], 0)
    write_random_model(tmp_path / "another", TINY_MODELS["llama"], 1)
    names = list(SPECULATION_PROMPTS)
    plain: dict[str, Result] = {}
    for drafting in ("another", "model"):
        draft = DraftSpec(tmp_path / drafting, num_tokens=6)
        runner = load_runner(
            TorchSpec(tmp_path / "model", dtype=dtype, num_blocks=160, block_size=16, draft=draft, device=DEVICE)
        )
        assert runner.model.bit_exact
        for name in names if not plain else ():
            plain |= generate(runner, [name])[0]
        assert generate(runner, names)[0] == plain
        config = SpeculationConfig("draft_model", num_speculative_tokens=6, model=str(tmp_path / drafting))
        for name in names:
            assert generate(runner, [name], config)[0] == {name: plain[name]}
        found, stats = generate(runner, names, config)
        assert found == plain
        assert stats.num_draft_tokens > 0
        assert generate(runner, names, config, without=["greedy", "forced"])[0] == plain
    found, stats = generate(runner, names, SpeculationConfig(prompt_lookup_min=1))
    assert found == plain
    assert stats.num_accepted_tokens > 0
    perfect = dict.fromkeys(names, lambda to_come: to_come[:12])
    assert generate(runner, names, None, perfect, plain)[0] == plain


def test_a_chunk_without_tokens_is_computed_when_its_step_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are offered to decode nodes at once, which read them without regard to the GPU's queue."""
    write_random_model(tmp_path, TINY_MODELS["llama"], 0)
    runner = load_runner(TorchSpec(tmp_path, dtype="bfloat16", num_blocks=64, device=DEVICE))
    operations = runner._transformer._operations
    store = operations.store_kv

    def store_late(*arguments: Any) -> None:
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # cycles: a tenth of a second
        store(*arguments)

    monkeypatch.setattr(operations, "store_kv", store_late)
    driver = RunnerDriver(runner)
    driver.add("prompt", PROMPTS["of-70"])
    for count in (32, 16):
        assert not driver.step({"prompt": count}).sampled_token_ids
        assert torch.cuda.current_stream().query()


def test_offline_use() -> None:
    chat = [{"role": "user", "content": "Sort a list."}]
    prompts: list[str | list[int]] = ["def fibonacci(n):\n" * 30, "class Turtle:", [5, 6, 7, 8]]
    params = [
        OfflineParams(temperature=0.0, max_tokens=40, prompt_logprobs=2, logprobs=2),
        OfflineParams(temperature=0.9, top_p=0.95, seed=11, n=2, max_tokens=40),
        OfflineParams(beam_width=3, n=2, max_tokens=12),
    ]
    speculation = SpeculationConfig("draft_model", num_speculative_tokens=4, model=str(DEMO_MODEL)).to_json()
    results = []
    for device, drafts in (("cpu", False), (DEVICE, False), (DEVICE, True)):
        with LLM(
            DEMO_MODEL,
            dtype="float32",
            device=device,
            max_num_seqs=8,
            seed=1,
            speculative_config=speculation if drafts else "",
        ) as llm:
            some = slice(0, 2 if drafts else 3)  # a beam search does not go with drafts
            together = llm.generate(prompts[some], params[some])
            alone = [llm.generate(*case)[0] for case in zip(prompts[some], params[some], strict=True)]
            assert [one.outputs for one in alone] == [one.outputs for one in together]
            chats = llm.chat(chat, OfflineParams(temperature=0.0, max_tokens=30))
            embedding = llm.embed("def f(x):")[0].embedding
            assert (llm.spec_decoding.num_drafts > 0) == drafts
        results.append(([one.outputs for one in (*together, *chats)], embedding))
    (_, on_cpu), (outputs, on_gpu), (drafted, _) = results
    assert [[one.token_ids for one in each] for each in results[0][0]] == [
        [one.token_ids for one in each] for each in outputs
    ]
    assert np.abs(on_cpu - on_gpu).max() < 1e-4
    assert drafted == [*outputs[:2], outputs[3]]


async def test_processes_hand_over_kv_on_one_gpu(tmp_path: Path) -> None:
    """Tokens of a prefill and a decode node, prompts in chunks, are those of a node alone."""
    config = {**TINY_MODELS["llama"], "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048}
    write_random_model(tmp_path / "model", {**config, "num_attention_heads": 8, "max_position_embeddings": 2048}, 3)
    rng = Random(5)
    prompts = {f"of-{length}": [rng.randrange(256) for _ in range(length)] for length in (5, 100, 700, 1500, 1501)}
    cases = {
        f"{name}-{temperature}": (prompt, temperature) for name, prompt in prompts.items() for temperature in (0.0, 0.8)
    }
    runner = load_runner(TorchSpec(tmp_path / "model", dtype="bfloat16", num_blocks=1200, device=DEVICE))
    assert runner.model.bit_exact
    requests = [
        Request(
            name, RequestSpec(prompt, SamplingParams(temperature=temperature, seed=7, max_tokens=24, ignore_eos=True))
        )
        for name, (prompt, temperature) in cases.items()
    ]
    expected = run_all(make_engine(runner), requests)
    flags = ("--device", DEVICE, "--dtype", "bfloat16", "--threads", "1", "--kv-cache-memory", "128MiB")
    more = ("--max-num-batched-tokens", "256", "--kv-digests", "on")
    with process_cluster(tmp_path / "run", tmp_path / "model", *flags, *more) as cluster:
        async with cluster.session() as session:
            for _ in range(2):  # the second time the prefill node has the prompts in its cache
                answers = [
                    await session.generate(
                        GenerateRequest(prompt, temperature=temperature, seed=7, max_tokens=24, ignore_eos=True)
                    )
                    for prompt, temperature in cases.values()
                ]
                for name, answer in zip(cases, answers, strict=True):
                    assert answer.token_ids == expected[name], name
                    assert answer.end.path.prefill_node == "prefill-0"
                    assert answer.end.path.attempts == 1
            assert sum(answer.end.kv_bytes for answer in answers) > 0
            await session.wait_until_idle()

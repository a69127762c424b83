"""Sampled and greedy tokens through the cluster equal those of one engine alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from baton.clock import SystemClock
from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.messages.generation import GenerateRequest
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.support.mini_cluster import mini_cluster, random_prompt
from tests.support.tiny_models import TINY_MODELS

pytestmark = pytest.mark.one_transport

BLOCK_SIZE = 16
NEW_TOKENS = 16
LENGTHS = (1, 15, 16, 17, 40, 64, 97, 130)

SAMPLINGS: dict[str, dict[str, float | int]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "top_n_sigma": 3.0},
    "penalised": {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    },
}


def alone(runner: TorchModelRunner, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """One engine, one request after the other: nobody shares a step, a chunk or a cached block."""
    outputs = []
    for index, (prompt, how) in enumerate(zip(prompts, params, strict=True)):
        config = SchedulerConfig(
            num_blocks=runner.memory.num_blocks, block_size=BLOCK_SIZE, max_num_seqs=4, enable_prefix_caching=False
        )
        engine = EngineCore(Scheduler(config, CacheKeyFields.of(runner.model, runner.layout), SystemClock()), runner)
        engine.scheduler.add_request(Request(f"alone-{index}", RequestSpec(prompt, how)))
        tokens: list[int] = []
        while engine.has_work():
            for step in engine.step().values():
                tokens += [token for output in step for token in output.new_token_ids]
        outputs.append(tokens)
    return outputs


@pytest.mark.parametrize(
    ("sampling", "dtype"),
    [("greedy", "bfloat16"), ("plain", "float32"), ("filtered", "float32"), ("penalised", "bfloat16")],
)
async def test_tokens_equal_one_engine_alone(tmp_path: Path, dtype: str, sampling: str) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen2"], seed=9, dtype=dtype)

    def make_runner(node_id: str) -> TorchModelRunner:
        return load_runner(TorchSpec(tmp_path, dtype=dtype, block_size=BLOCK_SIZE, num_blocks=96))

    rng = Random(4)
    prompts = [random_prompt(rng, length, 256) for length in LENGTHS]
    how = SAMPLINGS[sampling]
    params = [SamplingParams(seed=100 + i, max_tokens=NEW_TOKENS, ignore_eos=True, **how) for i in range(len(prompts))]  # type: ignore[arg-type]
    expected = alone(make_runner("alone"), prompts, params)
    async with mini_cluster(
        make_runner, tmp_path, prefill=2, decode=2, max_num_batched_tokens=32, max_num_seqs=8
    ) as cluster:
        requests = [
            GenerateRequest(prompt, seed=100 + i, max_tokens=NEW_TOKENS, ignore_eos=True, **how)  # type: ignore[arg-type]
            for i, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(cluster.generate(request) for request in requests))
        await cluster.wait_until_idle()
    assert [answer.token_ids for answer in answers] == expected
    assert {answer.end.path.prefill_node for answer in answers} == {"prefill-0", "prefill-1"}
    assert {answer.end.path.decode_node for answer in answers} == {"decode-0", "decode-1"}
    if sampling != "greedy":
        other = [SamplingParams(seed=7 + i, max_tokens=NEW_TOKENS, ignore_eos=True, **how) for i in range(8)]  # type: ignore[arg-type]
        assert alone(make_runner("alone"), prompts, other) != expected, "the seed must matter"

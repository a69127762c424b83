"""Nodes with little device memory and a host tier: transfers, preemptions and evictions at once change no token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from baton.messages.generation import GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec, StepTime
from baton.runner.simulated import SimulatedRunner
from tests.support.mini_cluster import mini_cluster, random_prompt
from tests.support.simulated_oracle import expected_tokens

SPEC = SimulatedSpec(
    block_size=4,
    vocab_size=997,
    max_model_len=88,
    num_host_blocks=200,
    step_time=StepTime(per_step=2e-3, per_prefill_token=2e-4, per_copied_block=1e-6),
    sleep=time.sleep,
)
NUM_BLOCKS = {"prefill": 20, "decode": 24}
NEW_TOKENS = 40
ROUNDS = 10
"""At most: how requests meet on the decode node is a matter of time."""


def make_runner(node_id: str) -> SimulatedRunner:
    return SimulatedRunner(replace(SPEC, num_blocks=NUM_BLOCKS[node_id.partition("-")[0]]))


@pytest.mark.parametrize(
    ("transport", "mode", "ahead"),
    [
        ("default", "recompute", "on"),
        ("default", "swap", "off"),
        ("tcp", "swap", "on"),
        ("default", "auto", "on"),
    ],
    indirect=["transport"],
)
async def test_tokens_do_not_depend_on_how_requests_are_preempted(tmp_path: Path, mode: str, ahead: str) -> None:
    rng = Random(7)
    shared = random_prompt(rng, 12, 997)
    prompts = [shared * (i % 2) + random_prompt(rng, 3 * i + 1, 997) for i in range(10)]
    requests = [GenerateRequest(prompt, seed=i, max_tokens=NEW_TOKENS) for i, prompt in enumerate(prompts)]
    expected = [
        expected_tokens(prompt, SamplingParams(seed=i, max_tokens=NEW_TOKENS), SPEC) for i, prompt in enumerate(prompts)
    ]
    way = "recompute" if mode == "recompute" else "swap"
    async with mini_cluster(
        make_runner,
        tmp_path,
        token_ids_only=True,
        preemption_mode=mode,
        host_cache_memory=1 << 20,
        async_scheduling=ahead,
    ) as cluster:
        prefill, decode = (cluster.nodes[name].node.scheduler for name in ("prefill-0", "decode-0"))
        for _ in range(ROUNDS):
            answers = await asyncio.gather(*(cluster.generate(request) for request in requests))
            assert [answer.token_ids for answer in answers] == expected
            await cluster.wait_until_idle()
            gave_way = decode.make_stats().num_preemptions_by_mode[way]
            came_back = prefill.make_stats().prefix_cache.num_hit_tokens["host"]
            if gave_way and came_back:
                break
        assert gave_way, f"nobody was preempted by {way}"
        assert came_back, "nothing that the prefill node had evicted was found in its host tier"
    assert decode.make_stats().free_host_blocks == decode.make_stats().total_host_blocks

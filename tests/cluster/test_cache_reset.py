"""Operators reset the prefix cache of a node, and the router learns that it is empty."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import OperatorClient
from baton.errors import CacheInUse
from baton.messages.generation import GenerateRequest
from baton.runner import SimulatedSpec, StepTime
from baton.runner.simulated import SimulatedRunner
from tests.support.mini_cluster import MiniCluster, mini_cluster

pytestmark = [pytest.mark.one_transport, pytest.mark.usefixtures("forked_commands")]

SPEC = SimulatedSpec(num_blocks=64, vocab_size=256, max_model_len=512)
PROMPT = [7] * 70


async def count_cached_tokens(cluster: MiniCluster, request_id: str) -> int:
    """Run the prompt once more and return how many of its tokens were cached."""
    answer = await cluster.generate(GenerateRequest(PROMPT, request_id, temperature=0.0, max_tokens=4))
    assert answer.finished is not None
    await cluster.wait_until_idle()
    return answer.finished.cached_tokens


async def test_a_reset_cache_is_empty_and_the_router_knows_it(tmp_path: Path) -> None:
    async with mini_cluster(lambda _: SimulatedRunner(SPEC), tmp_path, token_ids_only=True) as cluster:
        assert [await count_cached_tokens(cluster, f"r{number}") for number in range(2)] == [0, 64]
        nodes = ("prefill-0", "decode-0")
        forgotten = json.loads(await cluster.baton("cache", "reset", *nodes, "-o", "json"))["forgotten_blocks"]
        assert set(forgotten) == set(nodes)
        assert all(count >= 4 for count in forgotten.values())
        for node in nodes:
            assert cluster.nodes[node].node.scheduler.kv_cache_manager.num_cached_blocks == 0
        assert await count_cached_tokens(cluster, "again") == 0

        complaint = await cluster.baton("cache", "reset", "decode-7", exit_code=3)
        assert "no node is called decode-7" in complaint
        events = await cluster.baton("events", "-o", "json")
        assert events.count('"CacheReset"') == 2


async def test_a_cache_in_use_is_not_reset_and_the_error_says_what_uses_it(tmp_path: Path) -> None:
    slow = replace(SPEC, step_time=StepTime(per_step=0.05), sleep=time.sleep)
    async with mini_cluster(lambda _: SimulatedRunner(slow), tmp_path, token_ids_only=True) as cluster:
        operator = OperatorClient(cluster.router.operator)
        call = cluster.call(GenerateRequest(PROMPT, "long", temperature=0.0, max_tokens=400), 60.0)
        try:
            # Accepted, and the first tokens: the decode node has its blocks.
            for _ in range(3):
                await call.read()
            with pytest.raises(CacheInUse, match="decode-0: the prefix cache stays as it is, since blocks are in use"):
                await asyncio.to_thread(operator.reset_cache, "decode-0")
            call.cancel()
            await cluster.wait_until_idle()
            assert await asyncio.to_thread(operator.reset_cache, "decode-0") > 0
        finally:
            call.cancel()
            operator.close()

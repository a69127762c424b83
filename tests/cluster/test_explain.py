"""Placement by cached prefixes over real connections, and how operators see it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from baton.messages.generation import GenerateRequest
from baton.runner import SimulatedSpec, StepTime
from baton.runner.simulated import SimulatedRunner
from tests.support.metrics_page import read_metrics_samples
from tests.support.mini_cluster import MiniCluster, mini_cluster

pytestmark = [pytest.mark.one_transport, pytest.mark.usefixtures("forked_commands")]

SPEC = SimulatedSpec(
    num_blocks=96,
    vocab_size=256,
    max_model_len=512,
    step_time=StepTime(per_prefill_token=1e-3),
    sleep=time.sleep,
)
"""A prompt takes 0.2 s: delays by other processes are small beside it, so the router's rates are right."""
PROMPT = [7] * 200


async def ask(cluster: MiniCluster, request_id: str, prompt: list[int]) -> int:
    """Run a request to its end; return how many tokens of its prompt were cached."""
    answer = await cluster.generate(GenerateRequest(prompt, request_id, temperature=0.0, max_tokens=4))
    assert answer.finished is not None
    return answer.finished.cached_tokens


async def wait_for_cached_blocks(cluster: MiniCluster, num_blocks: int) -> None:
    """Wait until the router knows `num_blocks` cached blocks over all nodes; nodes report them asynchronously."""
    port = int(cluster.router.http.rpartition(":")[2])
    known = 0.0
    while known < num_blocks:
        # Each poll is a round trip, so the loop does not spin.
        samples = await read_metrics_samples(port)
        known = sum(value for name, value in samples.items() if name.startswith("baton_router_cached_blocks"))


async def test_a_request_goes_where_its_prefix_is_cached_and_explain_says_why(tmp_path: Path) -> None:
    # Otherwise a node that is idle could pull the prefix, rather than one that is busy for a moment have it.
    settings = {"max_local_prefill_tokens": 0, "kv_pulls": "off"}

    def make_runner(_: str) -> SimulatedRunner:
        return SimulatedRunner(SPEC)

    async with mini_cluster(
        make_runner, tmp_path, prefill=2, decode=2, token_ids_only=True, router_settings=settings
    ) as cluster:
        on_both_nodes = 2 * (len(PROMPT) // SPEC.block_size)
        assert await ask(cluster, "first", [*PROMPT, 1]) == 0
        await wait_for_cached_blocks(cluster, on_both_nodes)
        assert await ask(cluster, "other", [8, *PROMPT]) == 0
        await wait_for_cached_blocks(cluster, 2 * on_both_nodes)
        assert await ask(cluster, "second", [*PROMPT, 2]) == 192
        first, second = [json.loads(await cluster.baton("explain", r, "-o", "json")) for r in ("first", "second")]
        (before,), (after,) = first["decisions"], second["decisions"]
        assert after["prefill_node"] == before["prefill_node"]
        assert (after["decision"], after["reason"]) == ("pair", "cheapest pair")
        taken = next(
            way
            for way in after["ways"]
            if (way["prefill_node"], way["decode_node"]) == (after["prefill_node"], after["decode_node"])
        )
        assert (taken["cached_tokens"], after["outcome"]["cached_tokens"]) == (192, 192)
        assert sum(way["cached_tokens"] == 192 for way in after["ways"]) < len(after["ways"]), "others have it not"
        listed = json.loads(await cluster.baton("get", "requests", "-o", "json"))
        assert [(row["request_id"], row["state"], row["output_tokens"]) for row in listed["items"]] == [
            ("second", "Finished", 4),
            ("other", "Finished", 4),
            ("first", "Finished", 4),
        ]
        described = json.loads(await cluster.baton("describe", "request", "first", "-o", "json"))
        assert described["attempts"] == 1
        assert [found["version"] for found in (first, second, listed, described)] == [1] * 4
        text = await cluster.baton("explain", "second")
        assert text.startswith("second, attempt 1, ")
        assert "in hindsight" in text
        assert "its tenant's counter was 418, that of a new tenant 0" in text
        # Two prompts of 201 tokens and one of which 9 were not cached, and twelve generated ones, which count twice.
        (tenant,) = json.loads(await cluster.baton("get", "tenants", "-o", "json"))["items"]
        assert (tenant["tenant"], tenant["service_class"], tenant["share_last_minute"]) == ("", "normal", 1.0)
        assert (tenant["served_tokens"], tenant["served_last_minute"], tenant["placed_last_minute"]) == (435, 435, 3)
        table = (await cluster.baton("get", "tenants", "-o", "wide")).splitlines()
        assert (table[0].split()[0], table[1].split()[:6]) == ("TENANT", ["-", "normal", "1", "0", "0", "100.0%"])
        timeline = json.loads(await cluster.baton("trace", "second", "-o", "json"))
        assert sum(stage["duration_ns"] for stage in timeline["stages"]) == timeline["total_ns"]
        first_token = [stage["duration_ns"] for stage in timeline["stages"] if not stage["after_first_token"]]
        assert sum(first_token) == timeline["ttft_ns"]
        assert (timeline["cached_tokens"], timeline["prefill_node"]) == (192, after["prefill_node"])

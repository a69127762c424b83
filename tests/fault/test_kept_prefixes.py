"""A transfer fails in its middle and the decode node computes the prompt: blocks that arrived are not recomputed.

Over TCP, where a read continues by itself.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.free_ports import first_free_port
from tests.support.metrics_page import read_metrics_samples
from tests.support.process_cluster import ProcessCluster, process_cluster
from tests.support.slow_model import CHUNK, FLAGS, STEP_TIMES, assert_undisturbed, slow_request

BLOCK_SIZE = 16
KEPT_CHUNKS = 3


@pytest.fixture
def recomputing(tmp_path: Path, model: Path, metrics_ports: int) -> Iterator[ProcessCluster]:
    environment = {**STEP_TIMES, "UCX_TLS": "tcp,self"}
    flags = ("--prefill", "1", "--decode", "1", "--on-transfer-failure", "recompute", "--block-size", str(BLOCK_SIZE))
    ports = ("--metrics-port", str(metrics_ports))
    with process_cluster(tmp_path / "run", model, *FLAGS, *flags, *ports, environment=environment) as cluster:
        yield cluster


@pytest.fixture
def metrics_ports() -> int:
    """The first port of two; the decode node's is the second one."""
    return first_free_port(2)


async def prompt_tokens(port: int) -> dict[str, float]:
    """The decode node's prompt tokens, by where their KV came from."""
    samples = await read_metrics_samples(port)
    name = "baton_prompt_tokens_by_source_total"
    return {
        source: sum(value for sample, value in samples.items() if sample.startswith(name) and f'"{source}"' in sample)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }


async def test_only_missing_blocks_are_computed_when_the_sender_dies(
    recomputing: ProcessCluster, metrics_ports: int
) -> None:
    request = slow_request("dies", chunks=KEPT_CHUNKS + 3, sampled=True)
    assert request.prompt is not None
    num_tokens = len(request.prompt)
    async with recomputing.session() as session:
        await session.wait_until_whole()
        before = await prompt_tokens(metrics_ports + 1)
        answering = asyncio.create_task(session.generate(request))
        await session.wait_for_event("decode", "prefix_verified", "dies", KEPT_CHUNKS)
        killed = recomputing.signal("prefill-0", signal.SIGKILL)
        answer = await answering
        assert_undisturbed(answer, request)
        assert answer.end.path.attempts == 1, "nobody else was asked"
        events = await session.trace("decode-0", "dies")
        assert "kv_arrived" not in [event.name for event in events]
        verified = max(event.value for event in events if event.name == "prefix_verified")
        (kept,) = (event.value for event in events if event.name == "remote_kv_lost")
        # What was read up to the moment of the kill may be more than the test waited for.
        assert kept == verified * BLOCK_SIZE
        assert KEPT_CHUNKS * CHUNK <= kept < num_tokens
        after = await prompt_tokens(metrics_ports + 1)
        assert {source: after[source] - before[source] for source in after} == {
            "local_compute": num_tokens - kept,
            "local_cache_hit": 0,
            "external_kv_transfer": kept,
        }
        await session.wait_until_replaced(killed)
        await session.wait_until_idle()

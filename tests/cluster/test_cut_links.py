"""The connection between router and node breaks while both live: the stream continues and nothing is recomputed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.messages.generation import GenerateRequest
from tests.cluster.test_cancel import PARAMS, PROMPT, _spec, gated_cluster
from tests.support.cut_connections import cut_connections_to
from tests.support.mini_cluster import MiniCluster
from tests.support.simulated_oracle import expected_tokens
from tests.support.step_gate import StepGate

pytestmark = pytest.mark.one_transport


async def count_events(cluster: MiniCluster, node_id: str, name: str) -> int:
    """Return how many events of a node have this name."""
    return sum(event.name == name for event in await cluster.trace(node_id))


async def wait_until_adopted(cluster: MiniCluster, node_id: str) -> None:
    """Wait until the node has adopted an attempt. Each poll is a round trip, so the loop does not spin."""
    while not await count_events(cluster, node_id, "adopted"):
        pass


@pytest.mark.parametrize(
    ("node_id", "step"),
    [("prefill-0", 1), ("prefill-0", 3), ("decode-0", 1), ("decode-0", 4)],
    ids=["prompt begins", "in mid-prompt", "decoding begins", "in mid-stream"],
)
async def test_a_stream_survives_a_cut_of_its_link(tmp_path: Path, node_id: str, step: int) -> None:
    gates = {"prefill-0": StepGate(), "decode-0": StepGate()}
    gate = gates[node_id]
    gate.allow(step - 1)
    async with gated_cluster(tmp_path, gates["prefill-0"], gates["decode-0"]) as cluster:
        request = GenerateRequest(PROMPT, request_id="r", temperature=0.0, max_tokens=8)
        answering = asyncio.create_task(cluster.generate(request))
        await asyncio.to_thread(gate.wait_for_step, step)
        # To a prefill node the decode node has a connection, too, which is cut with the router's.
        assert cut_connections_to(cluster.nodes[node_id].description.address)
        await wait_until_adopted(cluster, node_id)
        gate.allow(None)
        answer = await answering
        assert answer.token_ids == expected_tokens(PROMPT, PARAMS, _spec())
        assert answer.indices == list(range(8)), "none twice, none missing"
        assert answer.end.path.attempts == 1
        assert await count_events(cluster, node_id, "abort") == 0
        await cluster.wait_until_idle()
        assert all(node.num_blocks_in_use == 0 for node in cluster.nodes.values())

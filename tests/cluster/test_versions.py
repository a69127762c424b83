"""Nodes of two versions side by side, as during an upgrade: pairs are of one version, and no request fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from baton.client import OperatorClient
from baton.config import NodeConfig
from baton.messages.generation import GenerateRequest
from baton.messages.node import NodeDescription
from baton.node.lifecycle import NodeStop
from baton.node.role import NodeRole, RoleContext
from baton.node.serve import Node
from baton.runner import SimulatedSpec
from baton.runner.simulated import SimulatedRunner
from decode_node.app import DecodeRole
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.layout import PROTOCOL_VERSION
from prefill_node.app import PrefillRole
from tests.doubles.fake_registry import FakeRegistry
from tests.support.mini_cluster import CLUSTER, MiniCluster, mini_cluster, random_prompt

pytestmark = pytest.mark.one_transport

SPEC = SimulatedSpec(num_blocks=192, vocab_size=256, max_model_len=512)
OLD = PROTOCOL_VERSION - 1
REQUESTS = [
    GenerateRequest(random_prompt(Random(seed), 40 + 10 * seed, 256), temperature=0.0, max_tokens=12)
    for seed in range(8)
]


def make_older_role(context: RoleContext) -> NodeRole:
    """Make the role of a node of the previous version."""
    make_role = PrefillRole if context.config.role == "prefill" else DecodeRole
    return make_role(context, lambda c, agent: NixlBackend(agent, c.runner.memory), OLD)


@asynccontextmanager
async def node(cluster: MiniCluster, directory: Path, role: str) -> AsyncIterator[None]:
    """An older node beside those of the cluster."""
    config = NodeConfig.model_validate(
        {"role": role, "node_id": f"{role}-old", "registry": "memory://", "cluster": CLUSTER, "model": directory}
        | {"block_size": SPEC.block_size, "max_num_batched_tokens": 64, "max_num_seqs": 16}
    )
    membership, stop, ready = FakeRegistry(cluster.store, CLUSTER), NodeStop(), asyncio.Event()

    def on_ready(_: NodeDescription) -> None:
        ready.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Node(config, SimulatedRunner(SPEC), make_older_role, membership).serve(on_ready, stop))
        await ready.wait()
        try:
            yield
        finally:
            stop()
    await membership.close()


async def wait_for_statuses(operator: OperatorClient, wanted: dict[str, str]) -> dict[str, str]:
    """Wait until the nodes have these statuses; return their details by name. Each poll is a round trip."""
    while True:
        nodes = (await asyncio.to_thread(operator.status)).nodes
        if wanted.items() <= {each.name: each.status for each in nodes}.items():
            return {each.name: each.detail for each in nodes}


async def test_nodes_of_incompatible_versions_are_never_paired(tmp_path: Path) -> None:
    settings = {"token_ids_only": True, "max_num_batched_tokens": 64}
    async with mini_cluster(lambda _: SimulatedRunner(SPEC), tmp_path, **settings) as cluster:  # type: ignore[arg-type]
        operator = OperatorClient(cluster.router.operator)
        right = [(await cluster.generate(request)).token_ids for request in REQUESTS]

        async def pairs() -> set[tuple[str, str]]:
            answers = [await cluster.generate(request) for request in REQUESTS]
            assert [answer.token_ids for answer in answers] == right
            paths = [answer.end.path for answer in answers]
            assert all(path.attempts == 1 for path in paths), "a pair had to be given up"
            return {(path.prefill_node, path.decode_node) for path in paths}

        async with node(cluster, tmp_path, "prefill"):
            details = await wait_for_statuses(operator, {"prefill-old": "Incompatible", "prefill-0": "Ready"})
            assert details["prefill-old"] == (
                "agrees with no decode node on its KV: "
                f"prefill-old [link_protocol={OLD}], decode-0 [link_protocol={PROTOCOL_VERSION}]"
            )
            assert await pairs() == {("prefill-0", "decode-0")}
            async with node(cluster, tmp_path, "decode"):
                await wait_for_statuses(
                    operator, dict.fromkeys(("prefill-old", "decode-old", "prefill-0", "decode-0"), "Ready")
                )
                assert await pairs() == {("prefill-0", "decode-0"), ("prefill-old", "decode-old")}
            await wait_for_statuses(operator, {"prefill-old": "Incompatible"})
            assert await pairs() == {("prefill-0", "decode-0")}
        operator.close()

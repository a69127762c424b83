"""How operators see a hand-off while it is running."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.errors import TransferCause, TransferFailed
from baton.messages.generation import GenerateRequest
from baton.messages.node_report import OpenHandoff
from baton.runner import SimulatedSpec, StepTime
from baton.runner.simulated import SimulatedRunner
from baton.v1 import operator_pb2, operator_pb2_grpc
from baton.wire.clients.node_client import NodeClient
from baton.wire.codec.operator import CLUSTER_STATUS
from tests.support.mini_cluster import MiniCluster, mini_cluster
from tests.support.step_gate import StepGate

pytestmark = pytest.mark.usefixtures("forked_commands")

SPEC = SimulatedSpec(num_blocks=96, vocab_size=256, max_model_len=512)


class MislabelledRunner(SimulatedRunner):
    """Claims to be the same model, so that only the link notices that its blocks differ."""

    def __init__(self, spec: SimulatedSpec) -> None:
        super().__init__(spec)
        self.model = SimulatedRunner(SPEC).model


async def wait_for_handoff(cluster: MiniCluster, node_id: str, state: str) -> OpenHandoff:
    """Wait until the node's one lease or transfer is in this state, and return it. Each poll is a round trip."""
    client = NodeClient(cluster.nodes[node_id].description.address)
    try:
        while True:
            report = await client.describe()
            if [handoff.state for handoff in report.handoff.open] == [state]:
                return report.handoff.open[0]
    finally:
        await client.close()


async def shown(cluster: MiniCluster, *words: str) -> Any:
    """What a command says in JSON."""
    return json.loads(await cluster.baton(*words, "-o", "json"))


@pytest.mark.one_transport
async def test_a_lease_is_listed_from_both_nodes_until_it_ends(tmp_path: Path) -> None:
    gate = StepGate(allowed=1)
    held = replace(SPEC, step_time=StepTime(1.0), sleep=gate)

    def make_runner(node_id: str) -> SimulatedRunner:
        return SimulatedRunner(held if node_id.startswith("prefill") else SPEC)

    settings = {"token_ids_only": True, "max_num_batched_tokens": 32}
    async with mini_cluster(make_runner, tmp_path, **settings) as cluster:  # type: ignore[arg-type]
        answer = asyncio.create_task(cluster.generate(GenerateRequest([1] * 80, temperature=0.0, max_tokens=4)))
        # Of five blocks two are computed; the third step waits at the gate.
        lease = await wait_for_handoff(cluster, "prefill-0", "READING")
        transfer = await wait_for_handoff(cluster, "decode-0", "READING")
        assert lease.attempt == transfer.attempt
        assert (lease.num_blocks, transfer.num_blocks) == (2, 5)

        rows = (await shown(cluster, "get", "leases"))["items"]
        seen = [(row["node"], row["side"], row["state"], row["peer"], row["num_blocks"]) for row in rows]
        assert seen == [
            ("prefill-0", "sender", "READING", "decode-0", 2),
            ("decode-0", "reader", "READING", "prefill-0", 5),
        ]
        assert {row["request_id"] for row in rows} == {lease.attempt.request_id}
        decoding = await shown(cluster, "get", "leases", "-l", "role=decode")
        assert [row["node"] for row in decoding["items"]] == ["decode-0"]
        described = (await shown(cluster, "describe", "node", "decode-0"))["report"]
        assert described["leases_by_state"] == {"READING": 1}
        assert described["waiting_by_reason"]["remote_kv"] == 1

        gate.allow(None)
        assert len((await answer).token_ids) == 4
        await cluster.wait_until_idle()
        assert await shown(cluster, "get", "leases") == {"version": 1, "items": []}
        described = (await shown(cluster, "describe", "node", "decode-0"))["report"]
        assert described["ended_transfers"] == [{"peer": "prefill-0", "outcome": "arrived", "count": 1}]


@pytest.mark.one_transport
async def test_a_link_refused_for_its_layout_is_shown_at_both_nodes(tmp_path: Path) -> None:
    def make_runner(node_id: str) -> SimulatedRunner:
        return SimulatedRunner(SPEC) if node_id.startswith("prefill") else MislabelledRunner(replace(SPEC, head_dim=16))

    settings = {"token_ids_only": True, "on_transfer_failure": "fail"}
    async with mini_cluster(make_runner, tmp_path, **settings) as cluster:  # type: ignore[arg-type]
        with pytest.raises(TransferFailed) as failed:
            await cluster.generate(GenerateRequest([1] * 40, temperature=0.0, max_tokens=4))
        assert failed.value.cause is TransferCause.LAYOUT_MISMATCH
        async with grpc.aio.insecure_channel(cluster.router.operator) as channel:
            stub, told = operator_pb2_grpc.OperatorStub(channel), dict[str, str]()
            while not (told.get("decode-0") and told.get("prefill-0")):
                answer = CLUSTER_STATUS.from_pb(await stub.GetStatus(operator_pb2.GetStatusRequest()))
                told = {node.name: node.detail for node in answer.nodes}
        for detail in (told["decode-0"], told["prefill-0"]):
            assert "KV layouts differ in geometry, block_bytes: prefill-0 [" in detail
            assert "], decode-0 [" in detail
        described = (await shown(cluster, "describe", "node", "decode-0"))["report"]
        assert described["refused_links"][0]["cause"] == "layout_mismatch"
        assert told["decode-0"] == described["refused_links"][0]["story"]

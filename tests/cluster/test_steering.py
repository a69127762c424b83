"""Operators' commands on a cluster that serves: no request fails and no token changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from baton.client import OperatorClient
from baton.errors import NodeNotFound, Unreachable
from baton.messages.generation import GenerateRequest
from baton.messages.operator import ClusterStatus, DrainProgress, NodeStatus
from baton.runner import SimulatedSpec, StepTime
from baton.runner.simulated import SimulatedRunner
from tests.support.mini_cluster import MiniCluster, mini_cluster, random_prompt

pytestmark = pytest.mark.one_transport

SPEC = SimulatedSpec(num_blocks=192, vocab_size=256, max_model_len=512)
SLOW = replace(SPEC, step_time=StepTime(0.5))
SETTINGS = {"token_ids_only": True, "max_num_batched_tokens": 64}
NUM_CLIENTS = 6


class Load:
    """Clients that repeat their requests and compare each answer with that of the quiet cluster."""

    def __init__(self, cluster: MiniCluster) -> None:
        self._cluster = cluster
        self._requests = [
            GenerateRequest(random_prompt(Random(seed), 20 + 30 * seed, 256), temperature=0.0, max_tokens=30 + 5 * seed)
            for seed in range(NUM_CLIENTS)
        ]
        self._is_stopped = False
        self.num_answers = 0
        self._answered = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the clients; at the end every request has the right answer."""
        right = [(await self._cluster.generate(request)).token_ids for request in self._requests]
        clients = [
            asyncio.create_task(self._ask(*each), name=f"client-{index}")
            for index, each in enumerate(zip(self._requests, right, strict=True))
        ]
        try:
            yield
        finally:
            self._is_stopped = True
            await asyncio.gather(*clients)

    async def _ask(self, request: GenerateRequest, right: list[int]) -> None:
        while not self._is_stopped:
            answer = await self._cluster.generate(request)
            assert answer.token_ids == right
            self.num_answers += 1
            self._answered.set()

    async def wait_for_answers(self, count: int = NUM_CLIENTS) -> None:
        """Return once `count` more requests are answered."""
        wanted = self.num_answers + count
        while self.num_answers < wanted:
            self._answered.clear()
            await self._answered.wait()


class Operator:
    """Calls of an operator to the router, in threads beside the cluster's loop."""

    def __init__(self, cluster: MiniCluster) -> None:
        self._client = OperatorClient(cluster.router.operator)

    async def drain(self, name: str, *, stop: bool = False) -> list[DrainProgress]:
        return await asyncio.to_thread(lambda: list(self._client.drain(name, stop=stop)))

    async def cordon(self, *names: str) -> str:
        return await asyncio.to_thread(self._client.cordon, names)

    async def uncordon(self, *names: str) -> None:
        await asyncio.to_thread(self._client.uncordon, names)

    async def set_role(self, name: str, role: str) -> str:
        return (await asyncio.to_thread(self._client.set_role, name, role)).warning

    async def reasons(self) -> list[tuple[str, str]]:
        """Return reason and subject of all events."""
        events = await asyncio.to_thread(lambda: list(self._client.events()))
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        return [(event.reason, event.subject) for event in events]

    async def status(self) -> ClusterStatus:
        return await asyncio.to_thread(self._client.status)

    async def wait_for_node(self, name: str, condition: Callable[[NodeStatus], bool]) -> NodeStatus:
        """Wait until the condition holds for a node, and return its status. Each poll is a round trip."""
        while True:
            nodes = [node for node in (await self.status()).nodes if node.name == name]
            found = next((node for node in nodes if condition(node)), None)
            if found is not None:
                return found

    def close(self) -> None:
        self._client.close()


@asynccontextmanager
async def cluster_under_load(directory: Path, **sizes: int) -> AsyncIterator[tuple[MiniCluster, Operator, Load]]:
    async with mini_cluster(lambda _: SimulatedRunner(SLOW), directory, **SETTINGS, **sizes) as cluster:  # type: ignore[arg-type]
        operator = Operator(cluster)
        load = Load(cluster)
        try:
            async with load.running():
                yield cluster, operator, load
        finally:
            operator.close()


async def test_draining_nodes_and_changing_roles_under_load_fails_no_request(tmp_path: Path) -> None:
    async with cluster_under_load(tmp_path, prefill=2, decode=2) as (cluster, operator, load):
        # A prefill node, whose blocks are on offer.
        await load.wait_for_answers()
        progress = await operator.drain("prefill-0")
        assert progress[-1] == DrainProgress(idle=True)
        assert not any(each.idle for each in progress[:-1])
        assert (await operator.wait_for_node("prefill-0", lambda node: node.cordoned)).status == "Cordoned"
        answers = cluster.nodes["prefill-0"].node.scheduler.make_stats()
        await load.wait_for_answers()
        assert answers == cluster.nodes["prefill-0"].node.scheduler.make_stats(), "it was asked for something"
        await operator.uncordon("prefill-0")
        assert (await operator.wait_for_node("prefill-0", lambda node: node.status == "Ready")).is_idle in (True, False)

        # A decode node becomes a prefill node and again what it was, over the same model.
        first = await operator.wait_for_node("decode-1", lambda node: node.role == "decode")
        assert await operator.set_role("decode-1", "prefill") == ""
        second = await operator.wait_for_node("decode-1", lambda node: (node.role, node.status) == ("prefill", "Ready"))
        assert second.incarnation != first.incarnation
        await load.wait_for_answers()
        await operator.set_role("decode-1", "decode")
        await operator.wait_for_node("decode-1", lambda node: (node.role, node.status) == ("decode", "Ready"))
        await load.wait_for_answers()

        # A decode node that is to end.
        assert (await operator.drain("decode-0", stop=True))[-1].stopped
        await cluster.nodes["decode-0"].task
        await load.wait_for_answers()
        reasons = await operator.reasons()
        for expected in (
            ("Cordoned", "prefill-0"),
            ("Uncordoned", "prefill-0"),
            ("RoleWanted", "decode-1"),
            ("NodeDraining", "decode-1"),
            ("RoleChanged", "decode-1"),
            ("NodeLeft", "decode-0"),
        ):
            assert expected in reasons
        assert "NodeLost" not in {reason for reason, _ in reasons}
    assert load.num_answers >= 5 * NUM_CLIENTS


async def test_without_the_registry_operators_changes_are_refused_and_requests_are_served(tmp_path: Path) -> None:
    async with cluster_under_load(tmp_path, prefill=1, decode=2) as (cluster, operator, load):
        with pytest.raises(NodeNotFound, match=r"no node is called decode-7 \(did you mean decode-\d\?\)"):
            await operator.cordon("decode-1", "decode-7")
        assert await operator.cordon("decode-1") == ""
        assert await operator.cordon("prefill-0") == "no prefill node is left for new requests"
        cluster.store.stop()
        with pytest.raises(Unreachable, match="nothing was changed, since the registry could not store it: registry"):
            await operator.uncordon("prefill-0")
        status = await operator.status()
        assert status.health == "degraded"
        assert {node.name for node in status.nodes if node.cordoned} == {"decode-1", "prefill-0"}
        await load.wait_for_answers()
        # It comes back with nothing in it, and is told again.
        cluster.store.restart(empty=True)
        await operator.uncordon("prefill-0")
        await operator.wait_for_node("prefill-0", lambda node: node.status == "Ready")
        assert {node.name for node in (await operator.status()).nodes if node.cordoned} == {"decode-1"}
        assert cluster.store.desired("mini").cordoned == {"decode-1"}
        assert (await operator.status()).health == "ok"
        await load.wait_for_answers()

"""Operators' commands on a cluster that serves: no request fails, and no token changes.

`BATON_DRILL_AWAY_S=60` stops Redis for a minute; with 0 it is stopped for a moment, and the test takes half a minute.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from baton.client import AsyncGenerationClient
from baton.config import bundled_model_dir
from baton.errors import ExitCode
from baton.messages.generation import GenerateRequest
from baton.registry.embedded import embedded_redis
from baton.registry.registry import Registry
from tests.support.kill_drill import DrillResult, Load, observe_answer, requests
from tests.support.process_cluster import BOUND_S, ProcessCluster, is_pending, process_cluster, wait_until_ended

AWAY_S = float(os.environ.get("BATON_DRILL_AWAY_S", "0"))
pytestmark = pytest.mark.skipif(
    "BATON_DRILL_AWAY_S" not in os.environ, reason="half a minute; BATON_DRILL_AWAY_S=0 runs it"
)
NUM_CLIENTS = 3
NUM_REQUESTS = 12
VOCAB_SIZE = 1024
LONG = GenerateRequest([1, 2, 3], temperature=0.0, max_tokens=1500, ignore_eos=True)
FLAGS = ("--prefill", "2", "--decode", "2", "--routers", "2", "--threads", "1")


class Operator:
    """Runs the command beside the load, and records how long it took."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self._cluster = cluster
        self.took: dict[str, float] = {}

    async def run(self, *words: str, exit_code: ExitCode = ExitCode.OK) -> dict[str, Any]:
        """Returns what it printed."""
        began = time.monotonic()
        done = await asyncio.to_thread(self._cluster.baton, *words, "-o", "json")
        self.took[" ".join(words)] = time.monotonic() - began
        assert done.returncode == exit_code, f"{words}: exit {done.returncode}: {done.stderr}"
        found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"said": done.stderr}
        return found

    async def do(self, *words: str) -> None:
        """For a command that prints nothing of interest."""
        done = await asyncio.to_thread(self._cluster.baton, *words)
        assert done.returncode == 0, f"{words}: exit {done.returncode}: {done.stderr}"

    async def running(self, request_id: str) -> dict[str, Any]:
        """A request, once it has given out tokens."""
        async with asyncio.timeout(BOUND_S):
            while True:
                rows = (await self.run("get", "requests", "--running"))["items"]
                for row in rows:
                    if row["request_id"] == request_id and row["output_tokens"]:
                        return dict(row)

    async def nodes(self) -> dict[str, dict[str, Any]]:
        """By name."""
        return {node["name"]: node for node in (await self.run("get", "nodes"))["items"]}


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with process_cluster(tmp_path_factory.mktemp("operated") / "run", bundled_model_dir(), *FLAGS) as running:
        yield running


@asynccontextmanager
async def under_load(cluster: ProcessCluster) -> AsyncIterator[Load]:
    """Clients send requests all the time; in the end each of their answers must be complete and right."""
    rng = Random(1)
    addresses = [process.address for process in cluster.state.processes if process.role == "router"]
    asked = requests(rng, NUM_REQUESTS, VOCAB_SIZE, longest_prompt=400)
    async with AsyncGenerationClient(*addresses, rng=rng) as client:
        undisturbed = [await observe_answer(client, request) for request in asked]
    load = Load(addresses, asked, undisturbed)
    clients = [asyncio.create_task(load.client(Random(rng.getrandbits(32)))) for _ in range(NUM_CLIENTS)]
    try:
        yield load
    finally:
        load.stop()
        await asyncio.gather(*clients)
    assert load.result.lost == []
    assert load.result.wrong == []
    assert load.result.answers


async def nodes_are_drained(operator: Operator) -> None:
    """Drain one prefill and one decode node at once, so that one of each is left."""
    drained = ("prefill-0", "decode-0")
    for found in await asyncio.gather(*(operator.run("drain", name) for name in drained)):
        assert found["nodes"][0]["drained"]
    nodes = await operator.nodes()
    for name in drained:
        busy = {key: nodes[name][key] for key in ("running", "waiting", "in_flight", "leased_blocks")}
        assert nodes[name]["status"] == "Cordoned"
        assert not any(busy.values()), (name, busy)
    await operator.do("uncordon", *drained)


async def a_node_changes_its_role_and_back(operator: Operator) -> None:
    for role in ("prefill", "decode"):
        assert (await operator.run("set-role", "decode-1", role))["is_ready"]
        assert (await operator.nodes())["decode-1"]["role"] == role


async def redis_is_killed_and_comes_back_empty(cluster: ProcessCluster, operator: Operator) -> None:
    """The desired state is the same before and after; it can't be changed meanwhile."""
    incarnations = {process.incarnation for process in cluster.state.processes if process.role != "redis"}
    await operator.do("cordon", "prefill-1")
    # The supervisor is stopped, too; otherwise it would start Redis again at once.
    with cluster.stopped(cluster.state.pid):
        cluster.signal("redis", signal.SIGKILL)
        until = time.monotonic() + AWAY_S
        async with cluster.session() as session:
            await session.wait_for_status(lambda status: status.health != "ok")
        while True:
            assert (await operator.run("status"))["health"] == "degraded"
            if time.monotonic() >= until:
                break
            await asyncio.sleep(min(5.0, AWAY_S / 4))
        refused = await operator.run("uncordon", "prefill-1", exit_code=ExitCode.UNREACHABLE)
        assert "the registry could not store it" in refused["said"]
    async with cluster.session() as session:
        status = await session.wait_for_status(lambda status: status.health == "ok")
        assert {node.name for node in status.nodes if node.cordoned} == {"prefill-1"}
    registry = Registry.connect(embedded_redis(cluster.run_dir).url, "default")
    try:
        async with asyncio.timeout(BOUND_S):
            async for desired in registry.watch_desired():
                if desired.cordoned == {"prefill-1"}:
                    break
            async for snapshot in registry.watch():
                if {record.incarnation for record in snapshot.values()} == incarnations:
                    break
    finally:
        await registry.close()
    await operator.do("uncordon", "prefill-1")


async def a_drained_node_ends_and_another_takes_its_place(cluster: ProcessCluster, operator: Operator) -> None:
    before = cluster.process("prefill-0")
    assert (await operator.run("drain", "prefill-0", "--stop"))["nodes"][0]["stopped"]
    await operator.do("uncordon", "prefill-0")
    async with cluster.session() as session:
        assert (await session.wait_until_replaced(before)).last_exit == "has ended with exit code 0"


async def a_second_signal_ends_a_draining_process(cluster: ProcessCluster, operator: Operator) -> None:
    """Restart a node and a router in the middle of an answer, which continues elsewhere."""
    addresses = [process.address for process in cluster.state.processes if process.role == "router"]
    async with AsyncGenerationClient(*addresses, rng=Random(2)) as client:
        right = await observe_answer(client, LONG)
        for role in ("decode", "router"):
            answering = asyncio.create_task(observe_answer(client, replace(LONG, request_id=f"long-{role}")))
            row = await operator.running(f"long-{role}")
            before = cluster.process(row["decode_node"] if role == "decode" else row["router"])
            operator.took[f"second SIGTERM of a {role}"] = await asyncio.to_thread(_end_with_two_signals, before.pid)
            answer = await answering
            assert answer.check(right) == ""
            assert role == "router" or answer.attempts == 2
            # Connections of its own: those to a router that ends take a while to begin again.
            async with cluster.session() as session:
                await session.wait_until_replaced(before)


def _end_with_two_signals(pid: int) -> float:
    """Returns how many seconds the second command took."""
    os.kill(pid, signal.SIGTERM)
    while is_pending(pid, signal.SIGTERM):
        # A second signal that comes before the first one is handled counts as one.
        time.sleep(0.001)
    began = time.monotonic()
    wait_until_ended([pid], lambda: os.kill(pid, signal.SIGTERM))
    return time.monotonic() - began


@pytest.mark.timeout(300 + 2 * AWAY_S)
async def test_operators_commands_fail_no_request(operated: ProcessCluster, capsys: pytest.CaptureFixture[str]) -> None:
    operator = Operator(operated)
    began = time.monotonic()
    async with under_load(operated) as load:
        await nodes_are_drained(operator)
        await redis_is_killed_and_comes_back_empty(operated, operator)
        await a_drained_node_ends_and_another_takes_its_place(operated, operator)
        await a_second_signal_ends_a_draining_process(operated, operator)
        await a_node_changes_its_role_and_back(operator)
    _print_result(capsys, time.monotonic() - began, load.result, operator)


def _print_result(capsys: pytest.CaptureFixture[str], seconds: float, result: DrillResult, operator: Operator) -> None:
    took = ", ".join(f"{what} {spent:.1f}" for what, spent in operator.took.items())
    with capsys.disabled():
        sys.stdout.write(
            f"\n{seconds:.0f} s, Redis away for {AWAY_S:g} s: {len(result.answers)} answers, {result.retried} retried, "
            f"{len(result.lost)} lost, {len(result.wrong)} wrong; took (s): {took}\n"
        )

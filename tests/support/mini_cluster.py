"""A whole cluster in one process: real gRPC, real NIXL, real engines, a registry in memory.

Every part runs the code that the processes run; only the processes themselves are missing.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from random import Random

import grpc

from baton.config import NodeConfig, RouterConfig
from baton.messages.node import NodeDescription, Role
from baton.messages.node_report import TraceEvent
from baton.node.lifecycle import NodeStop
from baton.node.serve import Node
from baton.registry import Membership
from baton.runner import ModelRunner
from baton.v1 import operator_pb2, operator_pb2_grpc
from baton.wire.clients.node_client import NodeClient
from baton.wire.codec.operator import CLUSTER_STATUS
from router.app import run_router
from router.process import RouterAddresses
from tests.doubles.fake_registry import FakeRegistry, FakeRegistryStore
from tests.support.caller import Caller
from tests.support.forked_commands import run_baton
from tests.support.reports import QueuedReports

CLUSTER = "mini"


class RunningNode:
    """One node of the cluster, through all its incarnations, and the handle that ends it."""

    def __init__(self, config: NodeConfig, runner: ModelRunner, membership: Membership) -> None:
        self.node: Node
        """The latest incarnation."""
        self.description: NodeDescription
        self.stop = NodeStop()
        self._ready = asyncio.Event()
        self.task = asyncio.create_task(self._serve(config, runner, membership), name=config.node_id)

    async def started(self) -> None:
        """Return once it serves. Raises the error if it can not start."""
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait((ready, self.task), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self.task.done():
            self.task.result()

    async def end(self) -> None:
        """End the node at once, without waiting for running requests."""
        self.stop()
        self.stop()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _serve(self, config: NodeConfig, runner: ModelRunner, membership: Membership) -> None:
        role: Role | None = Role(config.role)
        while role is not None:
            folder = "baton.encode" if role is Role.ENCODE else f"{role.value}_node"
            make_role = import_module(f"{folder}.app").make_role
            self.node = Node(config.model_copy(update={"role": role.value}), runner, make_role, membership)
            await self.node.serve(self._on_ready, self.stop)
            role = self.stop.pop_next_role()
            if role is not None:
                self.node.scheduler.kv_cache_manager.check_invariant()

    def _on_ready(self, description: NodeDescription) -> None:
        self.description = description
        self._ready.set()

    @property
    def num_blocks_in_use(self) -> int:
        """The number of blocks that are neither free nor idle in the prefix cache."""
        stats = self.node.scheduler.make_stats()
        return stats.total_blocks - stats.free_blocks


BOTH_KINDS: Mapping[str, object] = {"placement": "least-loaded"}
"""Settings with which short prompts take a prefill and a decode node, too."""


class MiniCluster(Caller):
    """A running cluster, made by `mini_cluster`."""

    def __init__(self, store: FakeRegistryStore) -> None:
        self.store = store
        self.nodes: dict[str, RunningNode] = {}
        self.router = RouterAddresses("", "", "")
        self.start_node: Callable[[str], Awaitable[ModelRunner]]
        """Starts a node of this name with a new model, in place of the one that has ended."""

    async def baton(self, *words: str, exit_code: int = 0) -> str:
        """Run a command on this cluster. Returns its output, or its complaint if another exit code than 0 is expected.

        Ask for the fixture `forked_commands`: the first fork takes seconds, in which a cluster would stand still.
        """
        command, pipe = [*words, "--address", self.router.operator], subprocess.PIPE
        done = await asyncio.to_thread(run_baton, command, os.environ, stdout=pipe, stderr=pipe, timeout=100.0)
        assert done.returncode == exit_code, done
        return done.stderr if exit_code else done.stdout

    async def trace(self, node_id: str) -> Sequence[TraceEvent]:
        """Return the events of a node, oldest first."""
        client = NodeClient(self.nodes[node_id].description.address)
        try:
            return await client.trace()
        finally:
            await client.close()

    async def wait_until_idle(self, *node_ids: str) -> None:
        """Wait until these nodes (default: all) use no block. Only the time limit of the test bounds the wait."""
        for node_id in node_ids or tuple(self.nodes):
            running = self.nodes[node_id]
            client = NodeClient(running.description.address)
            try:
                stream = QueuedReports(await client.attach("test-watcher"))
                async for report in stream:
                    load = report.load
                    if load.free_blocks == load.total_blocks and not (load.running or load.waiting):
                        break
                await stream.close()
            finally:
                await client.close()


@asynccontextmanager
async def mini_cluster(
    make_runner: Callable[[str], ModelRunner],
    model_dir: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    encode: int = 0,
    token_ids_only: bool = False,
    router_settings: Mapping[str, object] = BOTH_KINDS,
    num_ready: int | None = None,
    **node_settings: object,
) -> AsyncIterator[MiniCluster]:
    """Start router and nodes; `make_runner(node_id)` gives each node its model. Everything has ended on exit.

    `num_ready`: how many nodes get new requests; None: all.
    `token_ids_only`: no text is sent; of models without files, what the router reads is written to `model_dir`.
    """
    store = FakeRegistryStore()
    cluster = MiniCluster(store)
    async with AsyncExitStack() as stack:
        names = [f"encode-{i}" for i in range(encode)]
        names += [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]

        async def start_node(name: str) -> ModelRunner:
            runner = make_runner(name)
            if token_ids_only and not (model_dir / "config.json").exists():
                simulated_model_dir(model_dir, runner.model.vocab_size, runner.model.max_model_len)
            cluster.nodes[name] = await _start_node(stack, store, name, runner, model_dir, node_settings)
            return runner

        cluster.start_node = start_node
        for name in names:
            runner = await start_node(name)
        settings = {
            "model": model_dir,
            "model_name": runner.model.name,
            "runner": "simulated" if token_ids_only else "torch",
            **router_settings,
        }
        cluster.router = await _start_router(stack, store, settings)
        cluster.channel = grpc.aio.insecure_channel(cluster.router.grpc)
        stack.push_async_callback(cluster.channel.close, None)
        await _until_placeable(cluster, len(names) if num_ready is None else num_ready)
        yield cluster
    for running in cluster.nodes.values():
        running.node.scheduler.kv_cache_manager.check_invariant()


async def _start_node(
    stack: AsyncExitStack,
    store: FakeRegistryStore,
    name: str,
    runner: ModelRunner,
    model_dir: Path,
    settings: dict[str, object],
) -> RunningNode:
    role = name.partition("-")[0]
    values: dict[str, object] = {
        "role": role,
        "node_id": name,
        "registry": "memory://",
        "cluster": CLUSTER,
        "model": model_dir,
        "block_size": runner.layout.block_size,
        "drain_s": 5.0,
        "max_num_seqs": 16,
        **settings,
    }
    config = NodeConfig.model_validate(values)
    membership = FakeRegistry(store, CLUSTER)
    stack.push_async_callback(membership.close)
    running = RunningNode(config, runner, membership)
    stack.push_async_callback(running.end)
    await running.started()
    return running


async def _start_router(
    stack: AsyncExitStack,
    store: FakeRegistryStore,
    settings: Mapping[str, object],
) -> RouterAddresses:
    values: dict[str, object] = {
        "registry": "memory://",
        "cluster": CLUSTER,
        "router_id": "router-0",
        "grpc_port": 0,
        "http_port": 0,
        "drain_s": 0.0,
        **settings,
    }
    config = RouterConfig.model_validate(values)
    membership, stop = FakeRegistry(store, CLUSTER), asyncio.Event()
    stack.push_async_callback(membership.close)
    ready: asyncio.Future[RouterAddresses] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_router(config, ready.set_result, stop, membership), name="router")

    async def end() -> None:
        stop.set()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)
    await asyncio.wait((ready, task), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    return ready.result()


async def _until_placeable(cluster: MiniCluster, num_nodes: int) -> None:
    """Wait until the router is attached to every node. Each question is a round trip, so the loop does not spin."""
    async with grpc.aio.insecure_channel(cluster.router.operator) as channel:
        stub = operator_pb2_grpc.OperatorStub(channel)
        while True:
            answer = CLUSTER_STATUS.from_pb(await stub.GetStatus(operator_pb2.GetStatusRequest()))
            if sum(node.status == "Ready" and node.role != "router" for node in answer.nodes) == num_nodes:
                return


def simulated_model_dir(directory: Path, vocab_size: int, max_model_len: int) -> Path:
    """Write the files that a router reads of a model when it serves token ids only; return the directory."""
    config = {"vocab_size": vocab_size, "max_position_embeddings": max_model_len}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def random_prompt(rng: Random, length: int, vocab_size: int) -> list[int]:
    """Return random token ids."""
    return [rng.randrange(vocab_size) for _ in range(length)]

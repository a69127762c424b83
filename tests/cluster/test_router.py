"""The whole router over real gRPC, between real clients and nodes with a scripted engine. No Redis, no torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from baton.config import RouterConfig
from baton.errors import ConfigError, DeadlineExceeded, Draining, InvalidRequest, RequestNotFound, Unreachable
from baton.messages.generation import Chunk, Finished, GenerateEvent, GenerateRequest, ModelCard
from baton.messages.node_model import GENERATES
from baton.runner import SimulatedSpec
from baton.wire.clients.generation_client import GenerationStub
from baton.wire.clients.operator_client import OperatorClient
from router.app import run_router
from router.process import RouterAddresses
from tests.doubles.fake_registry import FakeRegistry, FakeRegistryStore
from tests.support.router_parts import MODEL, decode, prefill, record_of
from tests.support.served_nodes import ServedNode, token_at

pytestmark = pytest.mark.one_transport

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Write a model with only a byte-level tokenizer; the token id of a lower-case letter is its code."""
    vocab = {chr(33 + place): place + 33 for place in range(94)}
    rest = [letter for letter in ALPHABET if letter not in vocab]
    vocab |= {letter: number for number, letter in zip([*range(33), *range(127, 400)], rest, strict=False)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, "max_position_embeddings": 64}))
    return tmp_path


class Cluster:
    """A router and its nodes, with calls of clients and operators."""

    def __init__(
        self,
        store: FakeRegistryStore,
        model_dir: Path,
        nodes: dict[str, ServedNode],
        runner: str,
        await_nodes: int = 0,
    ) -> None:
        self.store = store
        self.nodes = nodes
        self.stop = asyncio.Event()
        self.addresses: asyncio.Future[RouterAddresses] = asyncio.get_running_loop().create_future()
        self.config = RouterConfig.model_validate(
            {
                "registry": "unused",
                "cluster": "test",
                "router_id": "router-1",
                "model": model_dir,
                "model_name": MODEL,
                "grpc_port": 0,
                "http_port": 0,
                "runner": runner,
                "await_nodes": await_nodes,
                "placement": "least-loaded",
            }
        )
        self.membership = FakeRegistry(store, "test")
        self.task = asyncio.create_task(
            run_router(self.config, self.addresses.set_result, self.stop, membership=self.membership)
        )

    async def generate(self, request: GenerateRequest, timeout_s: float | None = 30.0) -> list[GenerateEvent]:
        stub = GenerationStub((await self.addresses).grpc)
        try:
            return [event async for event in stub.generate(request, timeout_s)]
        finally:
            await stub.close()

    async def statuses(self) -> dict[str, str]:
        """Return the status of every process by name, as operators see it."""
        stub = OperatorClient((await self.addresses).operator)
        try:
            status = await asyncio.to_thread(stub.status, 10.0)
            return {node.name: node.status for node in status.nodes}
        finally:
            stub.close()

    async def wait_for_status(self, wanted: str, *names: str) -> None:
        """Wait until all these processes have this status."""
        waiting = set(names)
        while waiting:
            statuses = await self.statuses()
            waiting = {name for name in waiting if statuses.get(name) != wanted}


@asynccontextmanager
async def cluster(model_dir: Path, *names: str, runner: str = "torch") -> AsyncIterator[Cluster]:
    nodes = {name: ServedNode(prefill(name) if name.startswith("p") else decode(name)) for name in names}
    store = FakeRegistryStore()
    for node in nodes.values():
        await node.start()
        record = record_of(node.description)
        store.put("test", record.incarnation, record.to_json())
    one = Cluster(store, model_dir, nodes, runner)
    try:
        await one.addresses
        await one.wait_for_status("Ready", *nodes)
        yield one
    finally:
        one.stop.set()
        await one.task
        for node in nodes.values():
            await node.kill()


def text_of(events: list[GenerateEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Chunk))


def end_of(events: list[GenerateEvent]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished)
    return last


def answer(prompt: str, length: int) -> str:
    return "".join(chr(token_at([ord(letter) for letter in prompt], index)) for index in range(length))


async def test_concurrent_requests_get_their_own_text(model_dir: Path) -> None:
    async with cluster(model_dir, "p1", "d1", "d2") as one:
        prompts = ["ab", "cd", "hello", "x"]
        runs = await asyncio.gather(*(one.generate(GenerateRequest(p, max_tokens=9)) for p in prompts))
        for prompt, events in zip(prompts, runs, strict=True):
            assert text_of(events) == answer(prompt, 9)
            finished = end_of(events)
            assert (finished.finish_reason, finished.completion_tokens) == ("length", 9)
            assert (finished.path.prefill_node, finished.path.attempts) == ("p1", 1)
            # The node's millisecond, and what it took the router to find the nodes.
            assert 1.0 <= finished.queue_ms <= finished.total_ms + 1.0
            assert finished.kv_bytes == 10
        assert {end_of(events).path.decode_node for events in runs} == {"d1", "d2"}


async def test_calls_of_operators_and_users_are_answered(model_dir: Path) -> None:
    async with cluster(model_dir, "p1", "d1") as one:
        addresses = await one.addresses
        operator, user = OperatorClient(addresses.operator), GenerationStub(addresses.grpc)
        try:
            status = await asyncio.to_thread(operator.status, 10.0)
            assert (status.cluster, status.health, status.detail) == ("test", "ok", "")
            assert [(n.name, n.role, n.status) for n in status.nodes] == [
                ("router-1", "router", "Ready"),
                ("d1", "decode", "Ready"),
                ("p1", "prefill", "Ready"),
            ]
            one.store.stop()
            status = await asyncio.to_thread(operator.status, 10.0)
            assert (status.health, [n.status for n in status.nodes]) == ("degraded", ["Ready"] * 3)
            assert text_of(await one.generate(GenerateRequest("ab", max_tokens=3))) == answer("ab", 3)
            one.store.restart(empty=True)
            assert await user.tokenize("", "ab") == [97, 98]
            assert await user.detokenize(MODEL, [97, 98]) == "ab"
            assert await user.list_models() == [ModelCard(MODEL, 64, 300, capabilities=GENERATES)]
            with pytest.raises(RequestNotFound):
                await user.cancel("nobody")
        finally:
            operator.close()
            await user.close()


async def test_a_router_that_awaits_nodes_is_ready_once_they_have_joined(model_dir: Path) -> None:
    nodes = {name: ServedNode(kind(name)) for name, kind in (("p1", prefill), ("d1", decode))}
    store = FakeRegistryStore()
    one = Cluster(store, model_dir, nodes, "torch", await_nodes=2)
    try:
        for number, node in enumerate(nodes.values()):
            assert not one.addresses.done(), f"ready with {number} of two nodes"
            await node.start()
            record = record_of(node.description)
            store.put("test", record.incarnation, record.to_json())
            await node.port_opened.wait()
        await one.addresses
        assert await one.statuses() == dict.fromkeys(["router-1", "p1", "d1"], "Ready")
    finally:
        one.stop.set()
        await one.task
        for node in nodes.values():
            await node.kill()


async def test_a_router_that_waits_for_nodes_can_be_stopped(model_dir: Path) -> None:
    one = Cluster(FakeRegistryStore(), model_dir, {}, "torch", await_nodes=1)
    one.stop.set()
    await one.task
    assert not one.addresses.done()


async def test_a_router_for_simulated_nodes_knows_their_model_before_they_join(tmp_path: Path) -> None:
    spec = SimulatedSpec()
    async with cluster(tmp_path / "nothing", runner="simulated") as one:
        user = GenerationStub((await one.addresses).grpc)
        try:
            card = ModelCard(MODEL, spec.max_model_len, spec.vocab_size)
            assert await user.list_models() == [card]
        finally:
            await user.close()
        # It waits for a node, and is not refused for its largest id.
        with pytest.raises(DeadlineExceeded):
            await one.generate(GenerateRequest([spec.vocab_size - 1]), timeout_s=0.1)


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("prompt", GenerateRequest("")),
        ("prompt", GenerateRequest([300])),
        ("prompt", GenerateRequest([1] * 64)),
        ("temperature", GenerateRequest("a", temperature=float("nan"))),
        ("max_tokens", GenerateRequest("a", max_tokens=0)),
        ("model", GenerateRequest("a", model="other")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_input_is_refused_by_name(model_dir: Path, field: str, request_: GenerateRequest) -> None:
    async with cluster(model_dir, "d1") as one:
        with pytest.raises(InvalidRequest) as caught:
            await one.generate(request_)
        assert caught.value.field == field
        assert one.nodes["d1"].received.empty()


@pytest.mark.parametrize("victim", ["p1", "d1"])
async def test_a_stream_continues_when_a_node_dies(model_dir: Path, victim: str) -> None:
    async with cluster(model_dir, "p1", "d1", "d2") as one:
        for name in ("p1", "d1", "d2"):
            one.nodes[name].is_stuck = True
        reading = asyncio.create_task(one.generate(GenerateRequest("ab", max_tokens=6)))
        to_prefill, to_decode = await one.nodes["p1"].next_submit(), await one.nodes["d1"].next_submit()
        prefill_port, decode_port = one.nodes["p1"].port, one.nodes["d1"].port
        assert prefill_port is not None
        assert decode_port is not None
        if victim == "d1":
            prefill_port.answer(to_prefill)
            decode_port.answer(to_decode, stop=4)
        for name in ("p1", "d2"):
            one.nodes[name].is_stuck = False
        one.nodes["d1"].is_stuck = False
        await one.nodes[victim].kill()
        events = await reading
        assert text_of(events) == answer("ab", 6)
        path = end_of(events).path
        assert path.attempts == 2
        assert victim not in (path.prefill_node, path.decode_node)


async def test_a_client_that_disconnects_frees_both_nodes(model_dir: Path) -> None:
    async with cluster(model_dir, "p1", "d1") as one:
        for node in one.nodes.values():
            node.is_stuck = True
        stub = GenerationStub((await one.addresses).grpc)
        events = stub.generate(GenerateRequest("ab", request_id="mine"), None)
        await anext(events)
        submitted = [await node.next_submit() for node in one.nodes.values()]
        await events.aclose()
        assert [(await node.next_abort()).attempt for node in one.nodes.values()] == [s.attempt for s in submitted]
        await stub.close()


async def test_a_stopping_router_lets_running_requests_end_and_removes_its_record(model_dir: Path) -> None:
    async with cluster(model_dir, "p1", "d1") as one:
        for node in one.nodes.values():
            node.is_stuck = True
        addresses = await one.addresses
        assert addresses.incarnation in dict(one.store.stored("test"))
        reading = asyncio.create_task(one.generate(GenerateRequest("ab", max_tokens=2)))
        submitted = {name: await node.next_submit() for name, node in one.nodes.items()}
        one.stop.set()
        await one.wait_for_status("Draining", "router-1")
        with pytest.raises((Draining, Unreachable)):
            await one.generate(GenerateRequest("cd"))
        for name, node in one.nodes.items():
            assert node.port is not None
            node.port.answer(submitted[name])
        assert text_of(await reading) == answer("ab", 2)
        await one.task
        assert addresses.incarnation not in dict(one.store.stored("test"))
        for node in one.nodes.values():
            await node.port_closed.wait()


async def test_a_router_that_can_not_start_says_why_in_one_line(model_dir: Path, tmp_path: Path) -> None:
    async with cluster(model_dir) as one:
        taken = int((await one.addresses).grpc.rpartition(":")[2])

        async def start(config: RouterConfig) -> None:
            membership = FakeRegistry(one.store, "test")
            try:
                await run_router(config, lambda _: pytest.fail("it started"), asyncio.Event(), membership)
            finally:
                await membership.close()

        with pytest.raises(ConfigError, match="the port is in use"):
            await start(one.config.model_copy(update={"router_id": "router-2", "grpc_port": taken}))
        with pytest.raises(ConfigError, match=r"the name router-1 is taken: .*--router-id"):
            await start(one.config)
        with pytest.raises(ConfigError, match="does not exist"):
            await start(one.config.model_copy(update={"model": tmp_path / "nowhere"}))
        one.store.stop()
        with pytest.raises(ConfigError, match="--registry"):
            await start(one.config)

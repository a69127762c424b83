"""One incarnation from start to stop, with a scripted engine behind real gRPC and a registry in memory."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.config import NodeConfig
from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.connector import KVTransferOutput
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.errors import BackgroundFault, BatonError, ConfigError, EngineFault, NodeLost
from baton.messages.ids import AttemptKey
from baton.messages.node import Adopt, Leg, NodeDescription, Outcome, RequestDelta, Role, Submit
from baton.messages.node_model import NodeShape
from baton.messages.node_report import HandoffReport, HandoffSide, OpenHandoff
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.node.lifecycle import NodeStop
from baton.node.process import RoleMaker, serve_roles
from baton.node.role import NodeRole, RoleContext
from baton.node.router_attempts import RouterAttempts
from baton.node.router_streams import RouterStreams
from baton.node.serve import Node
from baton.observe.metrics import Figure
from baton.runner import SimulatedSpec
from baton.wire.clients.node_client import NodeClient
from baton.wire.liveness import is_running
from prefill_node.app import PrefillRole
from tests.doubles.fake_ranked_runner import FakeRankedRunner, LossMoment
from tests.doubles.fake_registry import FakeRegistry, FakeRegistryStore
from tests.doubles.fake_role import FakeRole
from tests.doubles.fake_runner import FakeRunner, expected_tokens
from tests.doubles.fake_transfer_backend import FakeTransferBackend, FakeTransferFabric
from tests.support.reports import QueuedReports

KEY = AttemptKey("r", 1, 5)


class Running:
    """A node that serves, and the parts of it that tests use."""

    def __init__(
        self,
        directory: Path,
        make_role: Callable[[RoleContext], NodeRole] | None = None,
        runner: FakeRunner | FakeRankedRunner | None = None,
        **settings: object,
    ) -> None:
        self.runner = runner or FakeRunner(33, 16)
        self.role = FakeRole()
        self.context: RoleContext
        self.store = FakeRegistryStore()
        self.registry = FakeRegistry(self.store, "test")
        self.stop = NodeStop()
        self.description: asyncio.Future[NodeDescription] = asyncio.get_running_loop().create_future()
        config = NodeConfig.model_validate(
            {
                "role": "prefill",
                "node_id": "p",
                "registry": "memory://",
                "cluster": "test",
                "model": directory,
                "block_size": 16,
                "drain_s": 60.0,
                "max_num_seqs": 4,
                "metrics_port": 0,
                **settings,
            }
        )
        self.node = Node(config, self.runner, make_role or self._make_role, self.registry)
        self.task = asyncio.create_task(self.node.serve(self.description.set_result, self.stop))

    def _make_role(self, context: RoleContext) -> FakeRole:
        self.context = context
        return self.role

    async def client(self) -> NodeClient:
        return NodeClient((await self.description).address)


class OrderedRole(FakeRole):
    """A role that looks at its node's server when it may open links."""

    def __init__(self, context: RoleContext) -> None:
        super().__init__()
        self._address = context.address
        self.answers: asyncio.Task[bool]

    def serving(self) -> None:
        super().serving()
        self.answers = asyncio.create_task(is_running(self._address, 5.0))


@asynccontextmanager
async def running(
    directory: Path,
    make_role: Callable[[RoleContext], NodeRole] | None = None,
    runner: FakeRankedRunner | None = None,
    **settings: object,
) -> AsyncIterator[tuple[Running, NodeClient, QueuedReports]]:
    node = Running(directory, make_role, runner, **settings)
    client = await node.client()
    stream = QueuedReports(await client.attach("router-0", (await node.description).incarnation))
    try:
        yield node, client, stream
    finally:
        await stream.close()
        await client.close()
        node.stop.force()
        await asyncio.gather(node.task, return_exceptions=True)
        assert not node.role.is_up
        assert not await node.registry.read()
        await node.registry.close()


async def test_a_description_has_what_names_cached_blocks(tmp_path: Path) -> None:
    async with running(tmp_path) as (node, client, _):
        told = (await client.describe()).node
        fields = CacheKeyFields(told.model_fingerprint, told.dtype, told.kv_layout)
        assert fields == CacheKeyFields.of(node.runner.model, node.runner.layout)
        assert told.block_bytes == node.runner.layout.block_bytes


async def test_a_description_and_the_record_have_the_shape(tmp_path: Path) -> None:
    async with running(tmp_path, tp=2, pp=3) as (node, client, _):
        assert (await client.describe()).node.shape == NodeShape(2, 3)
        assert [(record.tp, record.pp) for record in (await node.registry.read()).values()] == [(2, 3)]


async def test_a_description_has_the_number_of_threads_that_compute(tmp_path: Path) -> None:
    async with running(tmp_path, threads=3) as (_, client, _):
        assert (await client.describe()).node.num_threads == 3


def submit(leg: Leg = Leg.WHOLE, max_tokens: int = 3) -> Submit:
    return Submit(KEY, leg, RequestSpec((1, 2, 3), SamplingParams(max_tokens=max_tokens)))


async def attached(node: NodeDescription) -> tuple[NodeClient, QueuedReports]:
    """A client of a node, and the stream of a router."""
    client = NodeClient(node.address)
    return client, QueuedReports(await client.attach("router-0", node.incarnation))


async def until_end(stream: QueuedReports) -> RequestDelta:
    async for report in stream:
        for delta in report.deltas:
            if delta.outcome is not None:
                return delta
    raise AssertionError


async def test_a_node_serves_drains_and_ends(tmp_path: Path) -> None:
    async with running(tmp_path) as (node, client, stream):
        stream.send(submit())
        assert (await until_end(stream)).outcome is Outcome.LENGTH
        await client.drain()
        await node.task
        with pytest.raises(NodeLost):
            await until_end(stream)


async def test_a_router_adopts_what_a_lost_router_had_submitted(tmp_path: Path) -> None:
    async with running(tmp_path) as (node, client, stream):
        stream.send(submit(max_tokens=400))
        reports = aiter(stream)
        told: list[RequestDelta] = []
        while not any(delta.token_ids for delta in told):
            told += (await anext(reports)).deltas
        await stream.close()
        second = QueuedReports(await client.attach("router-1", router_incarnation="router-1.x"))
        second.send(Adopt(KEY))
        end: Outcome | None = None
        tokens: list[int] = []
        async for report in second:
            for delta in report.deltas:
                assert not delta.token_ids or delta.first_index == len(tokens)
                tokens += delta.token_ids
                end = delta.outcome or end
            if end is not None:
                break
        assert end is Outcome.LENGTH
        vocab = node.runner.model.vocab_size
        assert tokens == expected_tokens((1, 2, 3), 400, seed=0, vocab_size=vocab)


async def test_the_metrics_page_has_the_figures_of_engine_and_role(tmp_path: Path) -> None:
    async with running(tmp_path) as (node, _, stream):
        node.role.shown = [Figure("kv_leases", "Leases.", 7, {"state": "granted"})]
        idle = await metrics(node)
        stream.send(submit())
        await until_end(stream)
        busy = await metrics(node)
        assert (await metrics(node, "/readyz"))[0] == "HTTP/1.1 200 OK"
    assert 'baton_kv_leases{model_name="scripted",node="p",role="prefill",state="granted"} 7.0' in idle
    queries = 'baton_prefix_cache_queries_total{model_name="scripted",node="p",role="prefill"}'
    assert f"{queries} 0.0" in idle
    assert f"{queries} 3.0" in busy
    with pytest.raises(ConnectionError):
        await metrics(node)


async def metrics(node: Running, path: str = "/metrics") -> list[str]:
    """The lines of the metrics page."""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.node.metrics_port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    text = (await reader.read()).decode()
    writer.close()
    return text.splitlines()


async def test_a_drain_waits_for_running_requests_however_often_it_is_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path) as (node, client, stream):
        stream.send(submit(Leg.PREFILL))
        assert (await until_end(stream)).outcome is Outcome.HANDED_OFF
        for _ in range(3):
            await client.drain()
        node.stop()
        async for report in stream:
            if report.load.draining:
                break
        assert report.load.leased_blocks == 1
        stream.send(submit())
        assert (await until_end(stream)).outcome is Outcome.REFUSED
        async with grpc.aio.insecure_channel((await node.description).address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service="baton.v1.Node"))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await metrics(node, "/readyz"))[0] == "HTTP/1.1 503 Service Unavailable"
        assert not node.task.done(), "a lease is out"
        node.context.tell_engine(KVTransferOutput(released=frozenset({str(KEY)})))
        await node.task


async def test_the_second_signal_waits_for_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as (node, _, stream):
        stream.send(submit(Leg.PREFILL))
        await until_end(stream)
        node.stop()
        node.stop()
        await node.task


async def test_an_engine_that_dies_ends_the_node_and_its_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as (node, _, stream):

        def broken() -> SchedulerOutput:
            raise ValueError("the books disagree")

        monkeypatch.setattr(node.node.scheduler, "schedule", broken)
        stream.send(submit())
        with pytest.raises(NodeLost):
            await until_end(stream)
        with pytest.raises(EngineFault, match="the books disagree"):
            await node.task


@pytest.mark.parametrize("moment", [None, *LossMoment])
async def test_a_node_whose_ranks_are_lost_ends_and_says_why_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], moment: LossMoment | None
) -> None:
    ranked = FakeRankedRunner(SimulatedSpec(num_blocks=33), NodeShape(tp=2))
    async with running(tmp_path, runner=ranked) as (node, _, stream):
        if moment is not None:
            ranked.lose_at_step(1, moment, 1, "rank 1 was ended by SIGKILL")
            stream.send(submit())
        else:
            ranked.lose("rank 1 was ended by SIGKILL")
        with pytest.raises(NodeLost):
            await until_end(stream)
        with pytest.raises(EngineFault, match=r"^the engine died: [\w ':]*rank 1 was ended by SIGKILL$"):
            await node.task
    assert "Traceback" not in "".join(capsys.readouterr())


async def test_a_step_whose_news_can_not_be_handled_ends_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a router would wait for ever for the dropped tokens. If its node is gone, it tries another."""
    async with running(tmp_path) as (node, _, stream):

        def broken(attempt: AttemptKey) -> None:
            raise ValueError("no figures")

        monkeypatch.setattr(node.role, "transfer_figures", broken)
        stream.send(submit())
        with pytest.raises(NodeLost):
            await until_end(stream)
        with pytest.raises(BackgroundFault, match=r"step-news.*no figures"):
            await node.task


async def test_a_mover_that_dies_ends_the_node_and_its_streams(tmp_path: Path) -> None:
    """Its links would go on sending heartbeats, and every hand-off would wait for bytes that nobody reads."""

    class Unpumped(FakeTransferBackend):
        def pump(self) -> None:
            raise OSError("a foreign error")

    def make_role(context: RoleContext) -> PrefillRole:
        fabric = FakeTransferFabric()
        return PrefillRole(context, lambda c, agent: Unpumped(fabric, agent, c.runner.memory))

    async with running(tmp_path, make_role) as (node, _, stream):
        stream.send(submit(Leg.PREFILL))
        assert (await until_end(stream)).outcome is Outcome.HANDED_OFF
        # The first lease of a node does this.
        role = node.node.role
        assert isinstance(role, PrefillRole)
        role.offering.mover.set_num_readers(1)
        with pytest.raises(NodeLost):
            await until_end(stream)
        with pytest.raises(BackgroundFault, match="background task mover failed: OSError"):
            await node.task


async def test_kv_that_no_decode_node_asks_for_is_kept_as_long_as_the_setting_says(tmp_path: Path) -> None:
    def make_role(context: RoleContext) -> PrefillRole:
        fabric = FakeTransferFabric()
        return PrefillRole(context, lambda c, agent: FakeTransferBackend(fabric, agent, c.runner.memory))

    async with running(tmp_path, make_role, kv_unclaimed_s=1.0) as (_, client, stream):
        stream.send(submit(Leg.PREFILL))
        assert (await until_end(stream)).outcome is Outcome.HANDED_OFF
        times: dict[str, int] = {}
        while "lease_expired" not in times:
            times = {event.name: event.monotonic_ns for event in await client.trace()}
        assert times["lease_expired"] - times["lease_granted"] >= 1e9


@pytest.mark.parametrize("kind", ["heartbeat", "posted-to-loop", "orphans"])
async def test_background_work_that_fails_ends_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def broken(*_arguments: object) -> None:
        monkeypatch.undo()
        raise ValueError("out of luck")

    monkeypatch.setattr("baton.node.service.HEARTBEAT_S", 0.01)
    async with running(tmp_path, orphan_grace_s=0.01) as (node, _, stream):
        if kind == "heartbeat":
            monkeypatch.setattr(RouterStreams, "beat", broken)
        elif kind == "posted-to-loop":
            node.context.post(broken)
        else:
            monkeypatch.setattr(RouterAttempts, "_expire", broken)
            stream.send(submit())
            await until_end(stream)
            await stream.close()
        with pytest.raises(BackgroundFault, match=rf"{kind} failed: ValueError\('out of luck'\)"):
            await node.task


async def test_a_role_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    node = Running(tmp_path)
    node.role.start_error = ConfigError("no transfer agent")
    with pytest.raises(ConfigError, match="no transfer agent"):
        await node.task
    assert not node.description.done()
    assert not await node.registry.read()
    await node.registry.close()


async def test_a_stop_before_it_is_ready_ends_it_in_order(tmp_path: Path) -> None:
    node = Running(tmp_path)
    node.stop()
    await node.task
    assert not node.role.is_up
    await node.registry.close()


async def test_a_router_that_attaches_while_the_node_ends_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as (node, client, stream):
        node.stop()
        with pytest.raises(NodeLost):
            await until_end(stream)
        with pytest.raises(BatonError) as caught:
            await client.attach("router-0")
        assert caught.value.retryable
        await node.task


async def test_a_node_changes_its_role_when_its_work_is_done_and_keeps_its_model(tmp_path: Path) -> None:
    async with changing(tmp_path) as (node, ready, task):
        first = await ready.get()
        client, stream = await attached(first)
        stream.send(submit(max_tokens=400))
        with pytest.raises(ConfigError, match=f"this is {first.incarnation}, not another"):
            await client.set_role(Role.DECODE, "another")
        await client.set_role(Role.DECODE, first.incarnation)
        assert (await until_end(stream)).outcome is Outcome.LENGTH
        second = await ready.get()
        await client.close()
        assert (second.role, second.node_id, second.address) == (Role.DECODE, "p", first.address)
        assert second.incarnation != first.incarnation
        assert [role for role, _ in node.made] == [Role.PREFILL, Role.DECODE]
        assert len({id(context.runner) for _, context in node.made}) == 1
        (record,) = (await node.registry.read()).values()
        assert (record.role, record.incarnation) == ("decode", second.incarnation)
        again, stream = await attached(second)
        await again.set_role(Role.DECODE)
        stream.send(submit())
        assert (await until_end(stream)).outcome is Outcome.LENGTH
        assert ready.empty(), "it is that already"
        # A drain for good leaves no new role.
        await again.set_role(Role.PREFILL)
        node.stop()
        await task
        await again.close()


class HeldRunner(FakeRunner):
    """Ends no step of a request before it is released."""

    def __init__(self) -> None:
        super().__init__(33, 16)
        self.released = threading.Event()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        assert self.released.wait(30.0)
        return super().execute_model(scheduler_output)


async def test_what_runs_longer_than_a_change_of_role_may_take_is_given_back_to_its_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = HeldRunner()
    monkeypatch.setattr(FakeRole, "attempt_aborted", lambda role, attempt: runner.released.set())
    async with changing(tmp_path, runner, drain_s=0) as (_, ready, _):
        first = await ready.get()
        client, stream = await attached(first)
        stream.send(submit(max_tokens=400))
        async for report in stream:
            if report.deltas:
                break
        await client.set_role(Role.DECODE, first.incarnation)
        ended = await until_end(stream)
        assert ended.outcome is Outcome.ABORTED
        assert ended.error == "it changes its role, and what it ran had its time to end"
        assert (await ready.get()).role is Role.DECODE
        await client.close()


@pytest.mark.parametrize("side", HandoffSide)
async def test_a_change_of_role_that_leaves_reads_behind_says_so_and_reuses_no_memory_that_they_may_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: HandoffSide
) -> None:
    monkeypatch.setattr("baton.node.drain.GIVE_UP_AFTER_S", 0.0)
    monkeypatch.setattr("baton.node.drain.HEARTBEAT_S", 0.01)
    async with changing(tmp_path) as (node, ready, task):
        first = await ready.get()
        client, stream = await attached(first)
        stream.send(submit(Leg.PREFILL))
        assert (await until_end(stream)).outcome is Outcome.HANDED_OFF
        state = "SUSPECT" if side is HandoffSide.SENDER else "QUARANTINED"
        node.reported = HandoffReport(open=[OpenHandoff(KEY, side, state, "d0", "d0.x", 1, 60.0)])
        await client.set_role(Role.DECODE, first.incarnation)
        if side is HandoffSide.READER:
            with pytest.raises(EngineFault, match="has to begin anew: the drain gave up on 1 blocks"):
                await task
            assert ready.empty()
        else:
            second = await ready.get()
            again, stream = await attached(second)
            async for report in stream:
                assert report.notice is not None
                assert report.notice.startswith("the drain gave up on 1 blocks")
                break
            await stream.close()
            await again.close()
        await client.close()


async def test_a_role_may_open_links_once_peers_can_ask_for_its_node(tmp_path: Path) -> None:
    made: list[OrderedRole] = []

    def make(context: RoleContext) -> OrderedRole:
        made.append(OrderedRole(context))
        return made[0]

    async with running(tmp_path, make):
        assert made[0].is_serving
        assert await made[0].answers


class Changing:
    """A node that may change its role."""

    def __init__(self) -> None:
        self.reported = HandoffReport()
        """What the role of the first incarnation reports."""
        self.made: list[tuple[Role, RoleContext]] = []
        self.stop = NodeStop()
        self.registry = FakeRegistry(FakeRegistryStore(), "test")

    def role_maker(self, role: Role) -> RoleMaker:
        def make(context: RoleContext) -> FakeRole:
            self.made.append((role, context))
            return ReportingRole(self) if len(self.made) == 1 else FakeRole()

        return make


class ReportingRole(FakeRole):
    def __init__(self, node: Changing) -> None:
        super().__init__()
        self._node = node

    def report(self) -> HandoffReport:
        return self._node.reported


@asynccontextmanager
async def changing(
    directory: Path, runner: FakeRunner | None = None, **settings: object
) -> AsyncIterator[tuple[Changing, asyncio.Queue[NodeDescription], asyncio.Task[None]]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    node, ready = Changing(), asyncio.Queue[NodeDescription]()
    values = {"role": "prefill", "node_id": "p", "registry": "memory://", "cluster": "test", "model": directory}
    config = NodeConfig.model_validate({**values, "block_size": 16, "max_num_seqs": 4, "port": port, **settings})
    task = asyncio.create_task(
        serve_roles(
            config,
            runner or FakeRunner(33, 16),
            Role.PREFILL,
            node.role_maker,
            node.registry,
            ready.put_nowait,
            node.stop,
        )
    )
    try:
        yield node, ready, task
    finally:
        node.stop.force()
        await asyncio.gather(task, return_exceptions=True)
        await node.registry.close()

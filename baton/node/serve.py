"""One incarnation of a node, from STARTING to STOPPED: start, ready, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import SystemRandom

import structlog

from baton import __version__
from baton.clock import SystemClock
from baton.config import NodeConfig
from baton.engine.block_hash import CacheKeyFields
from baton.engine.connector import KVTransferOutput
from baton.engine.core import EngineCore
from baton.engine.runner.base import ModelRunner
from baton.engine.runner.step_thread import StepThread
from baton.engine.scheduler import Scheduler
from baton.errors import EngineFault
from baton.ids import new_incarnation
from baton.node.driver import EngineDriver, StepNews
from baton.node.event_log import EventLog
from baton.node.figures import engine_figures
from baton.node.grammars import load_compiler
from baton.node.lifecycle import NodeEvent, node_lifecycle
from baton.node.outbox import Outbox
from baton.node.reports import node_record
from baton.node.role import NodeRole, RoleContext
from baton.node.runner_spec import scheduler_config
from baton.node.service import NodeService
from baton.observe.metrics import render
from baton.observe.metrics_page import MetricsPage
from baton.registry import Membership, require
from baton.rpc.messages import NodeDescription, Role
from baton.rpc.node_service import SERVICE_NAME, NodeServicer
from baton.rpc.server import RpcServer, join_address

_log = structlog.get_logger(__name__)


class NodeStop:
    """How a node is told to stop. A call is a signal: the first one drains, the second one does not wait any longer."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()
        self._signalled = False

    def __call__(self) -> None:
        if self._signalled:
            self.forced.set()
        self._signalled = True
        self.asked.set()

    def drain(self) -> None:
        """Let the running work end. Idempotent; a signal that follows is the first one."""
        self.asked.set()

    def force(self) -> None:
        """Don't wait for anything."""
        self.asked.set()
        self.forced.set()


class Node:
    """One incarnation. `serve` runs it; the parts are attributes for tests to look at."""

    def __init__(
        self,
        config: NodeConfig,
        runner: ModelRunner,
        make_role: Callable[[RoleContext], NodeRole],
        membership: Membership,
    ) -> None:
        self.incarnation = new_incarnation(config.node_id, SystemRandom())
        self.scheduler: Scheduler
        self.role: NodeRole
        self.metrics_port: int | None = None
        """Where the metrics page is, if there is one."""
        self._config = config
        self._runner = runner
        self._make_role = make_role
        self._membership = membership
        self._life = node_lifecycle(config.node_id)
        self._crash: BaseException | None = None
        self._rpc: RpcServer
        self._latest: StepNews

    async def serve(self, ready: Callable[[NodeDescription], None], stop: NodeStop) -> None:
        """Run until told to stop. Raises ConfigError before anything is started, EngineFault when the engine died."""
        await require(self._membership)
        async with AsyncExitStack() as cleanup:
            service = await self._start(cleanup, stop)
            self._life.feed(NodeEvent.STARTED)
            ready(service.describe())
            await stop.asked.wait()
            self._life.feed(NodeEvent.DRAIN)
            await self._drain(service, stop)
        self._life.feed(NodeEvent.STOP)
        if self._crash is not None:
            raise EngineFault(f"the engine died: {self._crash!r}") from self._crash

    async def _start(self, cleanup: AsyncExitStack, stop: NodeStop) -> NodeService:
        """Bring everything up, each part after those that it needs; `cleanup` undoes it backwards."""
        config, loop, clock, log = self._config, asyncio.get_running_loop(), SystemClock(), EventLog()
        # First of all: while the vocabulary is taken in, nothing else of this process runs.
        grammars = load_compiler(config, self._runner.model)

        def post(action: Callable[[], None]) -> None:
            # The engine's thread may outlive the loop by its last step.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(action)

        def tell_engine(news: KVTransferOutput) -> None:
            driver.tell_transfer(news)

        def crashed(error: BaseException) -> None:
            _log.error("the engine died", exc_info=error)
            self._crash = self._crash or error
            post(stop.force)

        def on_step(news: StepNews) -> None:
            self._latest = news
            try:
                service.on_step(news)
            except Exception as error:
                # Its routers would wait for ever for what got lost here. When the node ends they go elsewhere.
                crashed(error)

        def publish(news: StepNews) -> None:
            post(lambda: on_step(news))

        self._rpc = rpc = RpcServer((SERVICE_NAME,))
        port = rpc.bind(config.host, config.port)
        cleanup.push_async_callback(rpc.stop, 1.0)
        outbox = Outbox(post)
        address = config.advertise or join_address(config.host, port)
        context = RoleContext(
            config=config,
            incarnation=self.incarnation,
            address=address,
            runner=self._runner,
            clock=clock,
            post=post,
            post_after_step=outbox.add,
            tell_engine=tell_engine,
            record=log.record,
        )
        self.role = role = self._make_role(context)
        await role.start()
        cleanup.push_async_callback(role.stop)

        key_fields = CacheKeyFields.of(self._runner.model, self._runner.layout)
        limits = scheduler_config(config, self._runner)
        self.scheduler = Scheduler(limits, key_fields, clock, connector=role.connector)
        executor = StepThread() if config.async_scheduling == "on" else None
        core = EngineCore(self.scheduler, self._runner, executor)
        self._latest = StepNews({}, (), core.make_stats(), core.step_times)
        driver = EngineDriver(core, publish, crashed, outbox.flush, grammars)
        description = self._describe(address, key_fields)
        service = NodeService(description, role, driver, log, clock, stop.drain, config.orphan_grace_s)
        for servicer in (NodeServicer(service), *role.servicers):
            servicer.add_to_server(rpc.server)

        await self._open_metrics_page(cleanup)
        driver.start()
        cleanup.push_async_callback(asyncio.to_thread, driver.stop)
        await rpc.start()
        cleanup.callback(service.close)
        heartbeat = asyncio.create_task(service.heartbeat(), name=f"heartbeat-{config.node_id}")
        cleanup.callback(heartbeat.cancel)
        await rpc.set_ready(True)
        lease = await self._membership.lease(node_record(description, clock.wall(), config.lease_s))
        cleanup.push_async_callback(lease.close)
        return service

    async def _open_metrics_page(self, cleanup: AsyncExitStack) -> None:
        config = self._config
        if config.metrics_port is None:
            return
        page = MetricsPage(self._metrics)
        self.metrics_port = await page.start(config.host, config.metrics_port)
        cleanup.push_async_callback(page.stop)
        _log.info("metrics", node=config.node_id, url=f"http://{join_address(config.host, self.metrics_port)}/metrics")

    def _metrics(self) -> bytes:
        labels = {"model_name": self._runner.model.name, "node": self._config.node_id, "role": self._config.role}
        figures = engine_figures(self._latest.stats, self._latest.step_times)
        return render([*figures, *self.role.figures()], labels)

    async def _drain(self, service: NodeService, stop: NodeStop) -> None:
        """Refuse new work and let the running work end, bounded by drain_s or the second request to stop."""
        service.refuse_new_work()
        await self._rpc.set_ready(False)
        idle = asyncio.create_task(service.wait_idle())
        forced = asyncio.create_task(stop.forced.wait())
        try:
            await asyncio.wait((idle, forced), timeout=self._config.drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()
            forced.cancel()
            await asyncio.gather(idle, forced, return_exceptions=True)

    def _describe(self, address: str, key_fields: CacheKeyFields) -> NodeDescription:
        model, layout = self._runner.model, self._runner.layout
        return NodeDescription(
            node_id=self._config.node_id,
            incarnation=self.incarnation,
            role=Role(self._config.role),
            address=address,
            pid=os.getpid(),
            version=__version__,
            model=model.name,
            model_fingerprint=model.fingerprint,
            dtype=model.dtype,
            numerics=model.numerics,
            bit_exact=model.bit_exact,
            vocab_size=model.vocab_size,
            max_model_len=self.scheduler.max_model_len,
            block_size=layout.block_size,
            num_blocks=self._runner.memory.num_blocks,
            eos_token_ids=model.eos_token_ids,
            on_transfer_failure=self._config.on_transfer_failure,
            kv_layout=key_fields.layout,
            block_bytes=layout.block_bytes * len(layout.groups),
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
        )

"""Runs one incarnation of a node, from STARTING to STOPPED: start, ready, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from random import SystemRandom

import structlog

from baton.background import BackgroundWatch, OnFault, current_watch
from baton.clock import SystemClock
from baton.config import NodeConfig
from baton.engine.batch import StepTimes
from baton.engine.connector import KVTransferOutput
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.runner import ModelRunner, RunnerLost
from baton.engine.scheduler import Scheduler
from baton.errors import BackgroundFault, EngineFault
from baton.messages.ids import new_incarnation
from baton.messages.node import NodeDescription, Role
from baton.messages.node_report import OpenHandoff
from baton.node.adapters.adapter_threads import AdapterDirectories, AdapterThreads
from baton.node.attempts.attempt_times import AttemptSpans
from baton.node.attempts.grammars import load_compiler
from baton.node.driver import EngineDriver, StepNews
from baton.node.encoding import RowFetcher
from baton.node.lifecycle import NodeEvent, NodeState, NodeStop, node_lifecycle
from baton.node.name_claim import Asks, require_first, start_number
from baton.node.reports.figures import ComputedTotals, engine_figures, model_figures, rank_figures
from baton.node.reports.logs import EventLog
from baton.node.reports.reports import describe, node_record
from baton.node.role import NodeRole, RoleContext, Servicer
from baton.node.row_maker import DriverRowMaker
from baton.node.runner_spec import scheduler_config
from baton.node.service import NodeService
from baton.observe.metrics import render
from baton.observe.metrics_page import MetricsPage
from baton.observe.process_figures import process_figures
from baton.observe.start_tracing import start_tracing
from baton.registry import Membership
from baton.runner.execution.step_thread import StepThread
from baton.security.http_access import PageAuthenticator
from baton.security.keys import KeyRing
from baton.security.matrix import CallerRole
from baton.wire.authenticator import Authenticator
from baton.wire.credentials import Dialer
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.server.server import RpcServer, join_address, reached_as
from baton.wire.services.encoder_rows_service import EncoderRowsServicer
from baton.wire.services.node_service import SERVICE_NAME, NodeServicer


class Outbox:
    """The actions and the work that were kept back. Belongs to the engine's thread."""

    def __init__(self, post: Callable[[Callable[[], None]], object]) -> None:
        """`post` runs a callable on the event loop, in order."""
        self._post = post
        self._kept: list[Callable[[], None]] = []
        self._work: list[Callable[[], None]] = []

    def add(self, action: Callable[[], None]) -> None:
        """Keep an action, which `flush` posts to the event loop."""
        self._kept.append(action)

    def add_work(self, work: Callable[[], None]) -> None:
        """Keep work, which `flush` does on this thread once all actions are posted."""
        self._work.append(work)

    def flush(self) -> None:
        """Post the actions in order, then do the work."""
        kept, self._kept = self._kept, []
        for action in kept:
            self._post(action)
        kept_work, self._work = self._work, []
        for work in kept_work:
            work()


_log = structlog.get_logger(__name__)


class Node:
    """One incarnation of a node. `serve` runs it. Its parts are public attributes for tests to read."""

    def __init__(
        self,
        config: NodeConfig,
        runner: ModelRunner,
        make_role: Callable[[RoleContext], NodeRole],
        membership: Membership,
        asks: Asks | None = None,
        gave_up: str = "",
    ) -> None:
        """`asks` finds out which incarnation answers at a record's address, in case another node of this name started
        at the same moment. `gave_up`: what the drain of the incarnation before left behind, for operators.
        """
        self.left: Sequence[OpenHandoff] = ()
        """Hand-offs whose reads had not ended when the drain gave up waiting for them."""
        self._gave_up = gave_up
        self.incarnation = new_incarnation(config.node_id, SystemRandom())
        self.scheduler: Scheduler
        self.role: NodeRole
        self.metrics_port: int | None = None
        """Port of the metrics page; None: there is none."""
        self._config = config
        self._runner = runner
        self._make_role = make_role
        self._membership = membership
        self._asks = asks
        self._life = node_lifecycle(config.node_id)
        self._crash: BaseException | None = None
        self._watch = BackgroundWatch()
        self._rpc: RpcServer
        self._service: NodeService
        self._latest: StepNews
        self._computed = ComputedTotals()

    async def serve(self, ready: Callable[[NodeDescription], None], stop: NodeStop) -> None:
        """Run until `stop` says so.

        Raises ConfigError when the node can't start, EngineFault when the engine died, and BackgroundFault when a
        background task failed that the node can't do without.
        """
        async with AsyncExitStack() as cleanup:
            service = await self._start(cleanup, stop)
            self._life.feed(NodeEvent.STARTED)
            ready(service.describe())
            await stop.requested.wait()
            self._life.feed(NodeEvent.DRAIN)
            await self._drain(service, stop)
            stop.on_drained()
        self._life.feed(NodeEvent.STOP)
        if isinstance(self._crash, BackgroundFault):
            raise self._crash
        if isinstance(self._crash, RunnerLost):
            raise EngineFault(f"the engine died: {self._crash}") from self._crash
        if self._crash is not None:
            raise EngineFault(f"the engine died: {self._crash!r}") from self._crash

    async def _start(self, cleanup: AsyncExitStack, stop: NodeStop) -> NodeService:
        """Start all parts, each after those that it needs; `cleanup` stops them in reverse order."""
        config, loop, clock, log = self._config, asyncio.get_running_loop(), SystemClock(), EventLog()
        # This comes first: while the vocabulary is loaded, nothing else of this process runs.
        grammars = load_compiler(config, self._runner.model)

        def post_unguarded(action: Callable[[], None]) -> None:
            # The engine's thread may outlive the event loop by its last step.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(action)

        def tell_engine(news: KVTransferOutput) -> None:
            driver.tell_transfer(news)

        def end(fault: BaseException) -> None:
            # A rank that is lost is noticed at several connections; what names the rank is kept.
            if self._crash is None or (isinstance(fault, RunnerLost) and isinstance(self._crash, BackgroundFault)):
                self._crash = fault
            post_unguarded(stop.force)

        def crashed(error: BaseException) -> None:
            if isinstance(error, RunnerLost):
                # This process has no fault that a traceback would show.
                _log.error("the engine ends", reason=str(error))
            else:
                _log.error("the engine died", exc_info=error)
            end(error)

        self._runner.on_lost(lambda reason: end(RunnerLost(reason)))
        self._watch = watch = BackgroundWatch(end)
        current_watch.set(watch)

        def post(action: Callable[[], None]) -> None:
            post_unguarded(watch.guarded(action, "posted-to-loop"))

        def on_step(news: StepNews) -> None:
            self._latest = news
            if news.step is not None:
                self._computed.note(news.step.figures)
            service.on_step(news)

        def publish(news: StepNews) -> None:
            # Routers would wait for ever for tokens that get lost here. When the node ends, they go elsewhere.
            post_unguarded(watch.guarded(lambda: on_step(news), "step-news"))

        tls = config.tls.live() if config.tls is not None else None
        authenticator = Authenticator(cluster=config.cluster if tls is not None else None)
        self._rpc = rpc = RpcServer(
            (SERVICE_NAME,), FaultBarrier(authenticator=authenticator), tls, asks_certificates=True
        )
        port = rpc.bind(config.host, config.port)
        cleanup.push_async_callback(rpc.stop, 1.0)
        outbox = Outbox(post)
        address = config.advertise or join_address(reached_as(config.host), port)
        context = RoleContext(
            config=config,
            incarnation=self.incarnation,
            address=address,
            runner=self._runner,
            clock=clock,
            post=post,
            post_after_step=outbox.add,
            after_step=outbox.add_work,
            tell_engine=tell_engine,
            record=log.record,
            dialer=Dialer.to_role(CallerRole.NODE, config.cluster, tls),
            membership=self._membership,
        )
        self.role = role = self._make_role(context)
        await role.start()
        cleanup.push_async_callback(role.stop)

        key_fields = CacheKeyFields.of(self._runner.model, self._runner.layout)
        limits = scheduler_config(config, self._runner)
        self.scheduler = Scheduler(limits, key_fields, clock, connector=role.connector)
        self._latest = StepNews({}, (), self.scheduler.make_stats(), StepTimes())
        check = self._runner.adapters.check
        adapters = AdapterThreads(self._runner, AdapterDirectories(config.adapter_directories, check))
        cleanup.push_async_callback(adapters.aclose)
        rows = RowFetcher(self._runner.model, context.dialer, clock, post)
        cleanup.push_async_callback(rows.close)
        driver = EngineDriver(
            self.scheduler,
            self._runner,
            publish,
            crashed,
            executor=StepThread() if config.schedules_ahead else None,
            flush=outbox.flush,
            grammars=grammars,
            adapters=adapters,
            max_cpu_loras=config.max_cpu_loras,
            rows=rows,
        )
        description = describe(
            config,
            self._runner,
            self.incarnation,
            key_fields,
            self.scheduler.max_model_len,
            address=address,
            link_protocol=role.link_protocol,
        )
        self._service = service = NodeService(
            description,
            role,
            driver,
            log,
            clock,
            stop.drain,
            config.orphan_grace_s,
            stop.change_role,
            self._trace(cleanup),
            self._runner.model.compute_paths,
            self._gave_up,
            self._runner.rank_reports,
            adapters,
        )
        maker = DriverRowMaker(driver, lambda: service.draining.refuses_new_work)
        makes_rows = description.role is Role.ENCODE
        encoder_rows = EncoderRowsServicer(
            description, self._runner.encoder.bytes_of, maker=maker if makes_rows else None
        )
        servicers: Sequence[Servicer] = (NodeServicer(service), encoder_rows, *role.servicers)
        for servicer in servicers:
            servicer.add_to_server(rpc.server)

        await self._open_metrics_page(cleanup)
        driver.start()
        cleanup.push_async_callback(asyncio.to_thread, driver.stop)
        await rpc.start()
        # Links are opened from here on, and peers ask at this node's address whether it runs.
        role.serving()
        cleanup.callback(service.close)
        heartbeat = watch.start(service.heartbeat, "heartbeat", config.node_id, on_fault=OnFault.END_PROCESS)
        cleanup.callback(heartbeat.cancel)
        await rpc.set_ready(True)
        number = await start_number(self._membership, config.node_id)
        lease = await self._membership.lease(node_record(description, clock.wall(), config.lease_s, number))
        cleanup.push_async_callback(lease.close)
        if self._asks is not None:
            await require_first(self._membership, lease.record, self._asks)
        return service

    def _trace(self, cleanup: AsyncExitStack) -> AttemptSpans | None:
        config = self._config
        tracer = start_tracing(os.environ, config.role, config.node_id, self.incarnation)
        if tracer is None:
            return None
        cleanup.push_async_callback(asyncio.to_thread, tracer.close)
        return AttemptSpans(tracer)

    async def _open_metrics_page(self, cleanup: AsyncExitStack) -> None:
        config = self._config
        if config.metrics_port is None:
            return
        keys = KeyRing(config.api_keys) if config.api_keys is not None else None
        page = MetricsPage(
            self._metrics, PageAuthenticator(config.host, config.allowed_hosts, keys), config.tls, self._is_ready
        )
        self.metrics_port = await page.start(config.host, config.metrics_port)
        cleanup.push_async_callback(page.stop)
        scheme, where = "http" if config.tls is None else "https", join_address(config.host, self.metrics_port)
        _log.info("metrics", node=config.node_id, url=f"{scheme}://{where}/metrics")

    def _is_ready(self) -> bool:
        return self._life.state is NodeState.READY

    def _metrics(self) -> bytes:
        labels = {"model_name": self._runner.model.name, "node": self._config.node_id, "role": self._config.role}
        figures = engine_figures(self._latest.stats, self._latest.step_times)
        computed = self._computed.figures(self._latest.stats)
        ranks = rank_figures(self._runner.rank_reports())
        adapters = self._service.adapter_figures()
        model = model_figures(self._runner.model)
        return render(
            [*model, *figures, *computed, *self.role.figures(), *adapters, *ranks, *process_figures()], labels
        )

    async def _drain(self, service: NodeService, stop: NodeStop) -> None:
        """Refuse new work and wait until the running work has ended.

        A second request to stop ends the wait, and so does drain_s. A node that only changes its role then gives back
        what runs, for other nodes, and waits until nobody reads its blocks. What is left is logged.
        """
        service.draining.refuse_new_work()
        await self._rpc.set_ready(False)
        idle = asyncio.create_task(service.draining.wait_idle())
        forced = asyncio.create_task(stop.forced.wait())
        for_good = asyncio.create_task(stop.for_good.wait())
        try:
            ends = (idle, forced, for_good)
            await asyncio.wait(ends, timeout=self._config.drain_s, return_when=asyncio.FIRST_COMPLETED)
            if not any(end.done() for end in ends):
                given_back = service.draining.give_back_work()
                _log.info("requests that were not done in time continue at other nodes", requests=given_back)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((idle, forced), timeout=self._config.drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (idle, forced, for_good):
                task.cancel()
            await asyncio.gather(idle, forced, for_good, return_exceptions=True)
        if idle.cancelled():
            _log.warning("the drain ended before all work had", left=service.draining.work_left())
        else:
            self.left = idle.result()

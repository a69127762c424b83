"""A node's process: start, ready, drain, stop. The second signal forces."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
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
from baton.engine.runner import load
from baton.engine.runner.base import ModelRunner
from baton.engine.scheduler import Scheduler
from baton.errors import BatonError, ExitCode
from baton.ids import new_incarnation
from baton.node.driver import EngineDriver, StepNews
from baton.node.event_log import EventLog
from baton.node.lifecycle import NodeEvent, node_lifecycle
from baton.node.role import NodeRole, RoleContext
from baton.node.runner_spec import runner_spec, scheduler_config
from baton.node.service import NodeService
from baton.registry.records import NodeRecord
from baton.registry.registry import Registry
from baton.rpc.messages import NodeDescription, Role
from baton.rpc.node_service import SERVICE_NAME, NodeServicer
from baton.rpc.server import RpcServer, join_address

_log = structlog.get_logger(__name__)


def run_node(config: NodeConfig, make_role: Callable[[RoleContext], NodeRole]) -> int:
    """Run one node until it is told to stop; returns the exit code. One line on the log says why it could not start."""
    try:
        runner = load(runner_spec(config))
        return asyncio.run(_Node(config, runner, make_role).run())
    except BatonError as error:
        _log.error("the node can't start", node=config.node_id, reason=str(error))
        return int(error.exit_code)


class _Node:
    """One incarnation."""

    def __init__(self, config: NodeConfig, runner: ModelRunner, make_role: Callable[[RoleContext], NodeRole]) -> None:
        self._config = config
        self._runner = runner
        self._make_role = make_role
        self._incarnation = new_incarnation(config.node_id, SystemRandom())
        self._life = node_lifecycle(config.node_id)
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._crash: BaseException | None = None

    async def run(self) -> int:
        """From STARTING to STOPPED."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._on_signal)
        async with AsyncExitStack() as cleanup:
            service = await self._start(cleanup)
            self._life.feed(NodeEvent.STARTED)
            _log.info("ready", node=self._config.node_id, incarnation=self._incarnation)
            await self._stop.wait()
            self._life.feed(NodeEvent.DRAIN)
            await self._drain(service)
        self._life.feed(NodeEvent.STOP)
        if self._crash is not None:
            _log.error("the engine died", node=self._config.node_id, reason=repr(self._crash))
            return int(ExitCode.FAILED)
        return int(ExitCode.OK)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._force.set()
        self._stop.set()

    def _on_crash(self, error: BaseException) -> None:
        self._crash = error
        self._force.set()
        self._stop.set()

    async def _start(self, cleanup: AsyncExitStack) -> NodeService:
        """Bring everything up, each part after those that it needs; `cleanup` undoes it backwards."""
        config, loop, clock, log = self._config, asyncio.get_running_loop(), SystemClock(), EventLog()

        def tell_engine(news: KVTransferOutput) -> None:
            driver.tell_transfer(news)

        def post(action: Callable[[], None]) -> None:
            # The engine's thread may outlive the loop by its last step.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(action)

        def publish(news: StepNews) -> None:
            post(lambda: service.on_step(news))

        def crashed(error: BaseException) -> None:
            post(lambda: self._on_crash(error))

        role = self._make_role(
            RoleContext(config, self._incarnation, self._runner, clock, post, tell_engine, log.record)
        )
        await role.start()
        cleanup.push_async_callback(role.stop)

        key_fields = CacheKeyFields.of(self._runner.model, self._runner.layout)
        scheduler = Scheduler(scheduler_config(config, self._runner), key_fields, clock, connector=role.connector)
        driver = EngineDriver(EngineCore(scheduler, self._runner), publish, crashed)

        rpc = RpcServer((SERVICE_NAME,))
        port = rpc.bind(config.host, config.port)
        description = self._describe(config.advertise or join_address(config.host, port))
        service = NodeService(description, role, driver, log, self._on_signal)
        NodeServicer(service).add_to_server(rpc.server)
        for servicer in role.servicers:
            servicer.add_to_server(rpc.server)

        driver.start()
        cleanup.push_async_callback(asyncio.to_thread, driver.stop)
        await rpc.start()
        cleanup.push_async_callback(rpc.stop, 1.0)
        cleanup.callback(service.close)
        heartbeat = asyncio.create_task(service.heartbeat(), name="heartbeat")
        cleanup.callback(heartbeat.cancel)

        registry = Registry.connect(config.registry, config.cluster)
        cleanup.push_async_callback(registry.close)
        await registry.lease(_record(description, clock.wall(), config.lease_s))
        await rpc.set_ready(True)
        return service

    async def _drain(self, service: NodeService) -> None:
        """Refuse new work and let the running work end, bounded by drain_s or the second signal."""
        service.refuse_new_work()
        idle = asyncio.create_task(service.wait_idle())
        forced = asyncio.create_task(self._force.wait())
        await asyncio.wait((idle, forced), timeout=self._config.drain_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        forced.cancel()

    def _describe(self, address: str) -> NodeDescription:
        model = self._runner.model
        return NodeDescription(
            node_id=self._config.node_id,
            incarnation=self._incarnation,
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
            max_model_len=model.max_model_len,
            block_size=self._runner.layout.block_size,
            num_blocks=self._runner.memory.num_blocks,
            eos_token_ids=model.eos_token_ids,
        )


def _record(description: NodeDescription, started_at: float, lease_s: float) -> NodeRecord:
    """What the node publishes of itself."""
    return NodeRecord(
        name=description.node_id,
        role=description.role.value,
        incarnation=description.incarnation,
        address=description.address,
        pid=description.pid,
        version=description.version,
        started_at=started_at,
        lease_s=lease_s,
        model=description.model,
        model_fingerprint=description.model_fingerprint,
        dtype=description.dtype,
        numerics=description.numerics,
        bit_exact=description.bit_exact,
        vocab_size=description.vocab_size,
        max_model_len=description.max_model_len,
        block_size=description.block_size,
        num_blocks=description.num_blocks,
        eos_token_ids=description.eos_token_ids,
    )

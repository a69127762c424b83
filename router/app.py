"""The router's program: reads the model directory, connects to the registry, and runs one router until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from baton.background import BackgroundWatch, current_watch
from baton.config import RouterConfig
from baton.errors import BackgroundFault, ExitCode
from baton.node.name_claim import Asks, proving_absence, require_free_name
from baton.observe.logs import log_also
from baton.observe.ready import Ready, announce
from baton.processes.ends import end_within
from baton.registry import Membership, NodeRecord, require
from baton.registry.base import FlightRecords
from baton.registry.connection import with_authority
from baton.registry.quotas import QuotaStore
from baton.registry.redis_flights import RedisFlightRecords
from baton.registry.redis_quotas import RedisQuotas
from baton.registry.registry import Registry
from baton.security.binds import check_bind
from baton.security.matrix import CallerRole
from baton.wire.clients.operator_client import OperatorClient
from baton.wire.credentials import Dialer
from baton.wire.server.event_loop import RpcEventLoop, warn_if_unrecognised
from router.http.server import raise_file_limit
from router.operations.idle_collector import set_thresholds
from router.process import RouterAddresses, RouterModel, RouterProcess

_log = logging.getLogger(__name__)

_ANSWER_S = 2.0


async def run_router(
    config: RouterConfig,
    ready: Callable[[RouterAddresses], None],
    stop: asyncio.Event,
    membership: Membership | None = None,
    records: FlightRecords | None = None,
    quotas: QuotaStore | None = None,
) -> None:
    """Run a router until `stop` is set, then drain it. `ready` is called once, when the ports answer.

    With a given membership quotas are kept in this process, unless a store is given for them, too.

    Raises ConfigError, before anything is started, for a bad model directory, a taken port or an unreachable registry;
    BackgroundFault if a background task without which the router can't go on has failed.
    """
    loop = asyncio.get_running_loop()
    fault: asyncio.Future[BackgroundFault] = loop.create_future()

    def end(background_fault: BackgroundFault) -> None:
        if not fault.done():
            fault.set_result(background_fault)

    def end_from_anywhere(background_fault: BackgroundFault) -> None:
        loop.call_soon_threadsafe(end, background_fault)

    current_watch.set(BackgroundWatch(end_from_anywhere))
    model = RouterModel.load(config)
    async with contextlib.AsyncExitStack() as stack:
        if model.template is not None:
            stack.callback(model.template.close)
            await asyncio.to_thread(model.template.check)
        if membership is None:
            registry_url = with_authority(config.registry, config.tls_ca)
            membership = Registry.connect(registry_url, config.cluster)
            stack.push_async_callback(membership.close)
            if config.flight_record_s:
                records = RedisFlightRecords.connect(registry_url, config.cluster, lifetime_s=config.flight_record_s)
                stack.push_async_callback(records.close)
            quotas = RedisQuotas.connect(registry_url, config.cluster)
            stack.push_async_callback(quotas.close)
        await require(membership)
        tls = config.tls.read() if config.tls is not None else None
        asks = asks_with(Dialer.to_role(CallerRole.ROUTER, config.cluster, tls))
        await require_free_name(membership, config.router_id, asks)
        await RouterProcess(config, membership, records, model, asks, quotas).run(ready, stop, fault)


def asks_with(dialer: Dialer) -> Asks:
    """A function that asks the router at a record's address for its incarnation."""

    def ask(address: str) -> str:
        with contextlib.closing(OperatorClient(address, dialer=dialer)) as client:
            # The router that answers is the first of its nodes.
            return client.status(_ANSWER_S).nodes[0].incarnation

    async def ask_in_thread(address: str) -> str:
        # In a separate thread: one of asyncio's would stay for ever, in just those routers that met such a record.
        thread = ThreadPoolExecutor(1)
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, ask, address)
        finally:
            thread.shutdown(wait=False)

    async def asks(record: NodeRecord) -> str:
        address = record.operator_address or record.address
        return await proving_absence(address, ask_in_thread(address))

    return asks


def main(config: RouterConfig) -> int:
    """Run a router until SIGTERM or SIGINT; a second signal forces its end. Returns the exit code.

    `config.notify_fd` gets a message when the router answers. Raises ConfigError if it can't start.
    """

    def ready(addresses: RouterAddresses) -> None:
        log_also(incarnation=addresses.incarnation, role="router")
        _log.info("ready: gRPC on %s, operators on %s, HTTP on %s", addresses.grpc, addresses.operator, addresses.http)
        warn_if_unrecognised(asyncio.get_running_loop())
        gc.collect()
        gc.freeze()
        announce(config.notify_fd, Ready(addresses.incarnation, addresses.grpc, addresses.operator, addresses.http))

    async def run() -> None:
        stop, loop, running = asyncio.Event(), asyncio.get_running_loop(), asyncio.current_task()

        def on_signal() -> None:
            if stop.is_set() and running is not None:
                end_within()
                running.cancel()
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        await run_router(config, ready, stop)

    check_bind(config.host, config.protection, needs_keys=True)
    raise_file_limit()
    set_thresholds()
    with contextlib.suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=RpcEventLoop) as runner:
        runner.run(run())
    return int(ExitCode.OK)

"""A node's process: signals, readiness and the exit code, and one model for all incarnations that it runs in turn."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

import structlog

from baton.config import NodeConfig
from baton.engine.runner import ModelInfo, ModelRunner
from baton.errors import ConfigError, EngineFault, ExitCode, Unreachable
from baton.failpoints import configure_failpoints
from baton.messages.node import NodeDescription, Role
from baton.node.leftovers import describe_left, may_be_written
from baton.node.lifecycle import NodeStop
from baton.node.name_claim import Asks, proving_absence, require_free_name
from baton.node.role import NodeRole, RoleContext
from baton.node.runner_spec import config_of_encoder, encoder_spec, runner_spec, with_defaults_of_device
from baton.node.serve import Node
from baton.observe.logs import log_also
from baton.observe.loop_probe import ProbedEventLoop
from baton.observe.ready import Ready, announce
from baton.processes.ends import end_within
from baton.processes.interpreter import rare_collections, switch_threads_early
from baton.registry import Membership, NodeRecord, require
from baton.registry.connection import with_authority
from baton.registry.registry import Registry
from baton.runner import load, load_encoder
from baton.runner.backends.cpu import kernel_file
from baton.runner.lean_imports import import_transformers
from baton.security.binds import check_bind, is_loopback
from baton.security.matrix import CallerRole
from baton.wire.clients.node_client import NodeClient
from baton.wire.credentials import Dialer

if TYPE_CHECKING:
    from baton.runner.stages.stage_leader import StageLeader

_ANSWER_S = 2.0
"""How long another process of this name may take to answer."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = structlog.get_logger(__name__)


RoleMaker = Callable[[RoleContext], NodeRole]


def run_node(config: NodeConfig, role_maker: Callable[[Role], RoleMaker]) -> int:
    """Run one node until SIGTERM or SIGINT; a second signal ends it at once. Returns the exit code.

    `role_maker` returns what makes the parts of a role. The role may differ from the one that the node was started as,
    and may change while it runs; the model stays. Raises ConfigError when the node can't start, EngineFault when its
    engine died.
    """
    check_bind(config.host, config.protection, needs_keys=config.metrics_port is not None)
    if config.role == "encode":
        config = config_of_encoder(config)
    if is_loopback(config.host):
        # UCX listens as well, by default on every interface that it finds.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    switch_threads_early()
    configure_failpoints(config.failpoints)
    # Before the model is loaded, which may take minutes.
    role = asyncio.run(_wanted_role(config))
    with rare_collections():
        if config.runner == "torch":
            import_transformers()
        config = with_defaults_of_device(config)
        if config.role == "encode":
            runner = load_encoder(encoder_spec(config))
        else:
            runner = load(runner_spec(config), _other_hosts(config))
    log_slow_paths(runner.model)
    # What is loaded by now stays: a full garbage collection of it would stop event loop and engine for 100 ms.
    gc.collect()
    gc.freeze()
    with closing(runner), asyncio.Runner(loop_factory=ProbedEventLoop) as loop:
        loop.run(_serve(config, runner, role, role_maker))
    return int(ExitCode.OK)


def _other_hosts(config: NodeConfig) -> StageLeader | None:
    """The stages of the node's other hosts, once all have come; None for a node on one host. Raises ConfigError."""
    if config.hosts == 1:
        return None
    # torch, which it imports, takes seconds.
    from baton.runner.stages.stage_leader import StageLeader
    from baton.wire.stage_hosts import StageListener, check_reachable

    check_reachable(config.host, config.first_host)
    tls = config.tls.live() if config.tls is not None else None
    _, port = config.first_host_address
    with closing(StageListener(config.host, port, node_id=config.node_id, cluster=config.cluster, tls=tls)) as hosts:
        links = hosts.accept(config.hosts, config.tp)
    _log.info("all hosts of this node are here, and load the model", hosts=[link.name for link in links])
    return StageLeader(links, tensor_parallel=config.tp)


def log_slow_paths(model: ModelInfo) -> None:
    """Log, for each part of the model that could be computed faster on another machine, why it is not here.

    Without compiled kernels no part is fast, and one line says so and what to do. The text has everything, since a
    program that uses `baton.LLM` may show the text alone.
    """
    slow = [path for path in model.compute_paths if path.why_not_faster]
    no_kernels = kernel_file.why_slow()
    if any(path.why_not_faster in no_kernels for path in slow):
        _log.warning(no_kernels)
        return
    for path in slow:
        _log.warning(f"a slower path: {path.part} is computed by {path.runs}, because {path.why_not_faster}")


async def _wanted_role(config: NodeConfig) -> Role:
    """The role that operators want, or else the configured one; raises ConfigError when the node's name is taken."""
    registry = Registry.connect(with_authority(config.registry, config.tls_ca), config.cluster)
    try:
        await require(registry)
        await require_free_name(registry, config.node_id, asks_with(_dialer(config)))
        wanted = (await registry.desired()).role_of(config.node_id)
    except Unreachable as error:
        raise ConfigError(str(error)) from None
    finally:
        await registry.close()
    if config.role == "encode":
        return Role.ENCODE
    if wanted not in (None, config.role):
        _log.info(
            "starts in the role that an operator has set", node=config.node_id, role=wanted, started_as=config.role
        )
    return Role(wanted or config.role)


async def _serve(config: NodeConfig, runner: ModelRunner, first: Role, role_maker: Callable[[Role], RoleMaker]) -> None:
    stop, loop = NodeStop(), asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_signalled:
            end_within()
        stop()

    def on_drained() -> None:
        # From here on a library may keep the interpreter for seconds, in which no signal handler in Python would run.
        for name in _SIGNALS if stop.is_signalled else ():
            loop.remove_signal_handler(name)
            signal.signal(name, signal.SIG_DFL)

    stop.on_drained = on_drained
    for name in _SIGNALS:
        loop.add_signal_handler(name, on_signal)
    registry = Registry.connect(with_authority(config.registry, config.tls_ca), config.cluster)
    is_announced = False

    def ready(description: NodeDescription) -> None:
        nonlocal is_announced
        _log.info(
            "ready",
            node=description.node_id,
            incarnation=description.incarnation,
            address=description.address,
            role=description.role.value,
        )
        if not is_announced:
            announce(config.notify_fd, Ready(description.incarnation, description.address))
        is_announced = True

    try:
        await serve_roles(config, runner, first, role_maker, registry, ready, stop)
    finally:
        await registry.close()


async def serve_roles(
    config: NodeConfig,
    runner: ModelRunner,
    first: Role,
    role_maker: Callable[[Role], RoleMaker],
    membership: Membership,
    ready: Callable[[NodeDescription], None],
    stop: NodeStop,
) -> None:
    """Run one incarnation after the other over one loaded model, each in the role that was asked for.

    Raises what `Node.serve` raises, and EngineFault when reads may still write to memory that the next incarnation
    would use.
    """
    role: Role | None = first
    gave_up = ""
    asks = asks_with(_dialer(config))
    while role is not None:
        own = config.model_copy(update={"role": role.value})
        node = Node(own, runner, role_maker(role), membership, asks, gave_up)
        log_also(incarnation=node.incarnation, role=role.value)
        await node.serve(ready, stop)
        role = stop.pop_next_role()
        gave_up = describe_left(node.left) if node.left else ""
        if role is not None and may_be_written(node.left):
            # The next incarnation would have the same memory. A new process has its own, and finds the wanted role in
            # the registry.
            raise EngineFault(f"to become a {role.value} node this process has to begin anew: {gave_up}")
        if role is not None:
            # The old incarnation leaves reference cycles of some megabytes.
            gc.collect()


def asks_with(dialer: Dialer) -> Asks:
    """A function that asks the node at a record's address which incarnation it is."""

    async def ask(address: str) -> str:
        client = NodeClient(address, dialer)
        try:
            return (await client.describe(_ANSWER_S)).node.incarnation
        finally:
            await client.close()

    async def asks(record: NodeRecord) -> str:
        return await proving_absence(record.address, ask(record.address))

    return asks


def _dialer(config: NodeConfig) -> Dialer:
    tls = config.tls.live() if config.tls is not None else None
    return Dialer.to_role(CallerRole.NODE, config.cluster, tls)

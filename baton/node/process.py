"""A node's process: signals, readiness and the exit code around one incarnation."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import structlog

from baton.config import NodeConfig
from baton.engine.runner import load
from baton.engine.runner.base import ModelRunner
from baton.errors import ExitCode
from baton.node.role import NodeRole, RoleContext
from baton.node.runner_spec import runner_spec
from baton.node.serve import Node, NodeStop
from baton.observe.ready import Ready
from baton.observe.ready import announce as tell_starter
from baton.registry.registry import Registry, require_registry
from baton.rpc.messages import NodeDescription

_log = structlog.get_logger(__name__)


def run_node(
    config: NodeConfig,
    make_role: Callable[[RoleContext], NodeRole],
    ready: Callable[[NodeDescription], None] = lambda description: None,
) -> int:
    """Run one node until SIGTERM or SIGINT; the second signal forces. Returns the exit code.

    `ready` is called once, when the node answers, and `config.notify_fd` is told. Raises BatonError when it can't start.
    """
    asyncio.run(require_registry(config.registry, config.cluster))
    runner = load(runner_spec(config))
    asyncio.run(_serve(config, runner, make_role, ready))
    return int(ExitCode.OK)


async def _serve(
    config: NodeConfig,
    runner: ModelRunner,
    make_role: Callable[[RoleContext], NodeRole],
    ready: Callable[[NodeDescription], None],
) -> None:
    stop, loop = NodeStop(), asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop)
    registry = Registry.connect(config.registry, config.cluster)

    def announce(description: NodeDescription) -> None:
        _log.info("ready", node=description.node_id, incarnation=description.incarnation, address=description.address)
        tell_starter(config.notify_fd, Ready(description.incarnation, description.address))
        ready(description)

    try:
        await Node(config, runner, make_role, registry).serve(announce, stop)
    finally:
        await registry.close()

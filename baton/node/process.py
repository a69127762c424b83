"""A node's process: signals, readiness and the exit code around one incarnation."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable

import structlog

from baton.config import NodeConfig
from baton.engine.runner import load
from baton.engine.runner.base import ModelRunner
from baton.errors import ExitCode
from baton.failpoints import look_for_failpoints
from baton.node.role import NodeRole, RoleContext
from baton.node.runner_spec import runner_spec
from baton.node.serve import Node, NodeStop
from baton.observe.ready import Ready, announce
from baton.registry.registry import Registry
from baton.rpc.messages import NodeDescription

_SWITCH_INTERVAL_S = 0.0005
"""Python's own 5 ms are as long as a decode step: so long may the loop keep the interpreter from a ready engine."""

_log = structlog.get_logger(__name__)


def run_node(config: NodeConfig, make_role: Callable[[RoleContext], NodeRole]) -> int:
    """Run one node until SIGTERM or SIGINT; the second signal forces. Returns the exit code.

    Raises ConfigError when it can't start, EngineFault when its engine died.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    look_for_failpoints(config.failpoints)
    asyncio.run(_serve(config, load(runner_spec(config)), make_role))
    return int(ExitCode.OK)


async def _serve(config: NodeConfig, runner: ModelRunner, make_role: Callable[[RoleContext], NodeRole]) -> None:
    stop, loop = NodeStop(), asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop)
    registry = Registry.connect(config.registry, config.cluster)

    def ready(description: NodeDescription) -> None:
        _log.info("ready", node=description.node_id, incarnation=description.incarnation, address=description.address)
        announce(config.notify_fd, Ready(description.incarnation, description.address))

    try:
        await Node(config, runner, make_role, registry).serve(ready, stop)
    finally:
        await registry.close()

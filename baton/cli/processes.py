"""`baton node` and `baton router`: the processes of a cluster, usable by hand on several hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from baton.cli.options import config_flags, option
from baton.cli.supervisor.parent import end_with_parent
from baton.config import Loaded, NodeConfig, RouterConfig
from baton.engine.runner.checkpoint import check_model_dir
from baton.errors import BatonError
from baton.observe.logs import configure_logging, log_level
from baton.observe.ready import Failed, announce

_EXTRA = (
    option("verbose", int, 0, "-v", "--verbose", count=True, help="Log more: -v, -vv.", show_default=False),
    option("parent_fd", int | None, None, hidden=True),
)


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    if name == "node":
        app.command(name, help=text)(config_flags(NodeConfig, _node, _EXTRA, _node_name))
    else:
        app.command(name, help=text)(config_flags(RouterConfig, _router, _EXTRA, _router_name))


def _node_name(flags: Mapping[str, Any]) -> Mapping[str, Any]:
    # Without a role the configuration's own complaint about it is the one to hear.
    return {"node_id": _host_name(flags.get("role") or "node")}


def _router_name(_flags: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"router_id": _host_name("router")}


def _host_name(kind: str) -> str:
    host = "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())
    return f"{kind}-{host[:40]}-{os.getpid()}"


def _node(loaded: Loaded[NodeConfig], _file: Path | None, verbose: int, parent_fd: int | None) -> None:
    config = loaded.config

    def run() -> int:
        if config.runner == "torch":
            # Cheap, and torch is not: a wrong path is told at once.
            check_model_dir(config.model)
        if config.role == "prefill":
            from prefill_node import app as prefill_app

            return prefill_app.main(config)
        from decode_node import app as decode_app

        return decode_app.main(config)

    _be(config.node_id, run, config.notify_fd, verbose, parent_fd)


def _router(loaded: Loaded[RouterConfig], _file: Path | None, verbose: int, parent_fd: int | None) -> None:
    config = loaded.config

    def run() -> int:
        from router import app as router_app

        return router_app.main(config)

    _be(config.router_id, run, config.notify_fd, verbose, parent_fd)


def _be(name: str, run: Callable[[], int], notify_fd: int | None, verbose: int, parent_fd: int | None) -> None:
    """Run a process to its end; whoever started it hears why it could not start."""
    if parent_fd is not None:
        end_with_parent(parent_fd)
    configure_logging(log_level(verbose, os.environ, "info"), environ=os.environ, process=name)
    # gRPC's core writes lines of its own about errors that come to us as exceptions.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        code = run()
    except BatonError as error:
        announce(notify_fd, Failed(str(error), int(error.exit_code)))
        raise
    if code:
        raise typer.Exit(code)

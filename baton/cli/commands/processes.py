"""`baton node` and `baton router`: the processes of a cluster, which can also be started by hand on several hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from baton.cli.options import LOG_FORMAT, VERBOSE, option, settings_command
from baton.config import Loaded, NodeConfig, RouterConfig
from baton.errors import BatonError, ConfigError
from baton.models.resolve import with_model_directory
from baton.processes.death_pipe import end_with_pipe
from baton.processes.interpreter import rare_collections
from baton.runner.lean_imports import import_transformers

if TYPE_CHECKING:
    from baton.messages.node import Role
    from baton.node.process import RoleMaker

_MORE = (VERBOSE, LOG_FORMAT, option("parent_fd", int | None, None, hidden=True))


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    if name == "node":
        settings_command(app, name, text, NodeConfig, _node, _MORE, _node_name)
    else:
        settings_command(app, name, text, RouterConfig, _router, _MORE, _router_name)


def _node_name(flags: Mapping[str, Any]) -> Mapping[str, Any]:
    # The role may be missing here; loading the settings then says so.
    return {"node_id": _host_name(flags.get("role") or "node")}


def _router_name(_flags: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"router_id": _host_name("router")}


def _host_name(kind: str) -> str:
    host = "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())
    return f"{kind}-{host[:40]}-{os.getpid()}"


def _node(
    loaded: Loaded[NodeConfig], _file: Path | None, verbose: int, log_format: str | None, parent_fd: int | None
) -> None:
    config = loaded.config

    def run() -> int:
        _check_hosts(config)
        resolved = with_model_directory(config)
        if resolved.runner == "torch":
            from baton.runner.model.checkpoint import check_model_dir

            # This check is fast and importing torch is slow, so a wrong path is reported first.
            check_model_dir(resolved.model)
        if resolved.host_rank > 0:
            with rare_collections():
                import_transformers()
                from baton.stage.host import run_stage_host

            return run_stage_host(resolved)
        with rare_collections():
            from baton.node.process import run_node

        return run_node(resolved, _role_maker)

    _run_process(config.node_id, run, config.notify_fd, verbose, log_format, parent_fd)


def _check_hosts(config: NodeConfig) -> None:
    """Raise ConfigError for settings with which hosts can't compute together, on each of them before they meet."""
    if config.host_rank >= config.hosts:
        raise ConfigError(
            f"host_rank is {config.host_rank}, but the hosts of this node are 0 to {config.hosts - 1}: give --hosts"
        )
    if config.hosts == 1:
        return
    if config.runner != "torch":
        raise ConfigError("the simulated runner computes in one process: leave --hosts out")
    if not config.first_host:
        raise ConfigError("a node on several hosts needs --first-host HOST:PORT, where host 0 waits for the others")
    from baton.runner.spec import check_hosts

    check_hosts(config.hosts, config.pp)


def _role_maker(role: Role) -> RoleMaker:
    from baton.messages.node import Role

    if role is Role.PREFILL:
        from prefill_node import app as prefill_app

        return prefill_app.make_role
    if role is Role.ENCODE:
        from baton.encode import app as encode_app

        return encode_app.make_role
    from decode_node import app as decode_app

    return decode_app.make_role


def _router(
    loaded: Loaded[RouterConfig], _file: Path | None, verbose: int, log_format: str | None, parent_fd: int | None
) -> None:
    config = loaded.config

    def run() -> int:
        with rare_collections():
            from router import app as router_app

        return router_app.main(with_model_directory(config))

    _run_process(config.router_id, run, config.notify_fd, verbose, log_format, parent_fd)


def _run_process(
    name: str,
    run: Callable[[], int],
    notify_fd: int | None,
    verbose: int,
    log_format: str | None,
    parent_fd: int | None,
) -> None:
    """Run a node or router to its end. If it can't start, the process that started it receives the reason."""
    from baton.observe import logs
    from baton.observe.ready import Failed, announce

    if parent_fd is not None:
        end_with_pipe(parent_fd)
    level, form = logs.log_level(verbose, os.environ, "info"), logs.log_format(log_format, os.environ)
    logs.configure_logging(level, environ=os.environ, form=form, node=name)
    # gRPC's core would print errors that reach Baton as exceptions, too.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        code = run()
    except BatonError as error:
        announce(notify_fd, Failed(str(error), int(error.exit_code)))
        raise
    if code:
        raise typer.Exit(code)

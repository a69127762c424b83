"""`baton status`."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.cluster_view import ClusterView, view_cluster
from baton.cli.output import Format, print_json, print_table, print_yaml, say
from baton.cli.target import OperatorAddressOption, RunDirOption
from baton.errors import ExitCode


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(status)


def status(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.", metavar="SECONDS", min=0)] = 5.0,
    output: Annotated[Format, typer.Option("-o", "--output", help="Output format.")] = Format.TEXT,
) -> None:
    """Say whether the cluster serves: ok, degraded or unavailable. Exit code 1 when it is unavailable."""
    view = view_cluster(address, run_dir, timeout)
    if output is Format.JSON:
        print_json(view.to_json())
    elif output is Format.YAML:
        print_yaml(view.to_json())
    else:
        _show(view)
    if view.health == "unavailable":
        raise typer.Exit(int(ExitCode.FAILED))


def _show(view: ClusterView) -> None:
    say(f"{view.cluster}: {view.health}{f' ({view.detail})' if view.detail else ''}")
    ready: dict[str, list[bool]] = {}
    for node in view.nodes:
        ready.setdefault(node.role, []).append(node.status == "Ready")
    say(", ".join(f"{sum(found)}/{len(found)} {role} ready" for role, found in ready.items()))
    if view.supervisor is not None:
        say()
        rows = [
            [process.name, process.status, str(process.restarts), str(process.pid or "-"), process.last_exit or "-"]
            for process in view.supervisor.processes
        ]
        print_table(["PROCESS", "STATUS", "RESTARTS", "PID", "LAST-EXIT"], rows)

"""`baton down`: the end of a cluster on this machine."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Annotated

import typer

from baton.cli.cluster.run_dir import RunDir
from baton.cli.output import Format, print_json, print_text, print_yaml
from baton.cli.target import RunDirOption, run_dir_of
from baton.errors import DeadlineExceeded


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(down)


def down(
    run_dir: RunDirOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.", metavar="SECONDS", min=0)] = 60.0,
    force: Annotated[bool, typer.Option("--force", help="End everything at once; running requests are lost.")] = False,
    output: Annotated[Format, typer.Option("-o", "--output", help="Output format.")] = Format.TEXT,
) -> None:
    """Stop the cluster: let running requests end, then end every process."""
    place = run_dir_of(run_dir)
    was_running = stop_cluster(place, timeout, force=force)
    result = {"run_dir": str(place.path), "was_running": was_running, "running": False}
    if output is Format.JSON:
        print_json(result)
    elif output is Format.YAML:
        print_yaml(result)
    elif was_running:
        print_text(f"stopped the cluster in {place.path}")
    else:
        print_text(f"no cluster is running in {place.path}")


def stop_cluster(place: RunDir, timeout_s: float, *, force: bool) -> bool:
    """Stop it and wait for its end; returns whether there was one. Raises DeadlineExceeded when it takes longer."""
    was_running = False
    # Two different signals: equal ones that come together are one to the kernel.
    numbers = (signal.SIGTERM, signal.SIGINT) if force else (signal.SIGTERM,)
    try:
        for holder in place.holders(timeout_s) if place.exists() else ():
            was_running = True
            for number in numbers:
                with suppress(ProcessLookupError):
                    os.kill(holder, number)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the cluster in {place.path} still drains after {timeout_s:g} s: "
            "wait on, or end it with `baton down --force`"
        ) from None
    return was_running

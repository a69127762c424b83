"""`baton down`: stops a cluster on this machine."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Annotated

import typer

from baton.cli.cluster.run_dir import RunDir
from baton.cli.output import Format, OutputOption, print_document, print_text
from baton.cli.target import RunDirOption, run_dir_of
from baton.errors import DeadlineExceeded


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(down)


def down(
    run_dir: RunDirOption = None,
    timeout: Annotated[float, typer.Option(help="Longest time to wait, in seconds.", metavar="SECONDS", min=0)] = 60.0,
    force: Annotated[
        bool, typer.Option("--force", help="Stop all processes at once; running requests are lost.")
    ] = False,
    output: OutputOption = Format.TEXT,
) -> None:
    """Stop the cluster: wait until running requests have ended, then stop all processes."""
    directory = run_dir_of(run_dir)
    was_running = stop_cluster(directory, timeout, force=force)
    result = {"run_dir": str(directory.path), "was_running": was_running, "running": False}
    if output is not Format.TEXT:
        print_document(output, result)
    elif was_running:
        print_text(f"stopped the cluster in {directory.path}")
    else:
        print_text(f"no cluster is running in {directory.path}")


def stop_cluster(directory: RunDir, timeout_s: float, *, force: bool) -> bool:
    """Stop a cluster and wait until it has ended. Returns whether one was running. Raises DeadlineExceeded."""
    was_running = False
    # Two different signals, since the kernel merges pending signals with the same number.
    numbers = (signal.SIGTERM, signal.SIGINT) if force else (signal.SIGTERM,)
    try:
        for holder in directory.holders(timeout_s) if directory.exists() else ():
            was_running = True
            for number in numbers:
                with suppress(ProcessLookupError):
                    os.kill(holder, number)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the cluster in {directory.path} is still draining after {timeout_s:g} s: "
            f"repeat {directory.command('down')} to wait longer, or stop it at once with "
            f"{directory.command('down --force')}"
        ) from None
    return was_running

"""`baton demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(demo)


def demo(
    model: Annotated[
        Path | None, typer.Option(help="What `baton up --model` takes. Default: the bundled model.", metavar="MODEL")
    ] = None,
) -> None:
    """Start a cluster, send it prompts, show how each was served, and stop it."""
    # These imports are slow, and the help does not need them.
    from baton.cli.commands.demo_run import run_demo

    raise typer.Exit(run_demo(model))

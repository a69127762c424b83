"""`baton move`: move a running stream to another decode node."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from baton.cli.ask import ask_about_request
from baton.cli.output import Format, OutputOption, print_result
from baton.cli.target import OperatorAddressOption, RunDirOption

_MOVE_S = 15.0
"""Longer than a router lets a move take."""


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(move)


def move(
    request: Annotated[str, typer.Argument(help="Id of the request.", metavar="REQUEST")],
    to: Annotated[
        str, typer.Option("--to", help="Node to move it to. [default: the least loaded]", metavar="NODE")
    ] = "",
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait until it has moved.", metavar="SECONDS", min=0)
    ] = _MOVE_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Move a running stream to another decode node. Its client notices nothing: the tokens are the same, and none is
    computed again.

    A stream that can't be moved, or that no node takes, stays where it is, and the error says why.
    """
    moved = ask_about_request(address, run_dir, lambda router: router.move(request, to, timeout))
    print_result(output, {"request_id": request, **asdict(moved)}, [f"{request}: {moved.source} -> {moved.to}"])

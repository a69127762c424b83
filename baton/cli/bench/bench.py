"""`baton bench`: the command group."""

from __future__ import annotations

import functools
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import typer

from baton.cli.bench.compare import compare
from baton.cli.bench.micro import engine, handoff, router, scheduler
from baton.cli.bench.nodes import nodes
from baton.cli.bench.overload import overload
from baton.cli.bench.report import report
from baton.cli.bench.serve import serve
from baton.cli.bench.validate import validate
from baton.cli.target import with_access
from baton.cli.waiting import closing_line


def register(app: typer.Typer, name: str, text: str) -> None:
    """Adds the command group to the application."""
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)

    @group.callback()
    def bench() -> None:
        """Measure this machine with real processes."""
        # SIGTERM ends the processes that the benchmark started, as Ctrl-C does.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    for command in (handoff, engine, scheduler, router, overload, report, compare, validate):
        group.command(command.__name__)(_with_closing_line(command))
    for client in (serve, nodes):
        group.command(client.__name__)(_with_closing_line(with_access(client)))
    app.add_typer(group, name=name)


def _with_closing_line(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which says on Ctrl-C what became of its measurement, unless it handles Ctrl-C itself."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        with closing_line("the measurement is not complete, and no file was written"):
            try:
                command(**values)
            except KeyboardInterrupt:
                # gRPC's server and event loop, which were not shut down, say so at the interpreter's end, in a warning
                # or by an exception in __del__: that is no news then.
                warnings.simplefilter("ignore", RuntimeWarning)
                sys.unraisablehook = lambda _: None
                raise

    return run

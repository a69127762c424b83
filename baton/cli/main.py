"""The command `baton`: finds the subcommand, turns errors into one line on stderr and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import typer

from baton.errors import BatonError, Cancelled, ExitCode

_COMMANDS = {
    "up": ("baton.cli.up", "Start a cluster on this machine and keep it running."),
    "down": ("baton.cli.down", "Stop the cluster: let running requests end, then end every process."),
    "status": ("baton.cli.status", "Say whether the cluster serves: ok, degraded or unavailable."),
    "get": ("baton.cli.get", "List what the cluster has: nodes."),
    "generate": ("baton.cli.generate", "Send a prompt and print what the model makes of it."),
    "bench": ("baton.cli.bench", "Measure: handoff."),
    "node": ("baton.cli.processes", "Be a prefill node or a decode node."),
    "router": ("baton.cli.processes", "Be a router."),
    "version": ("baton.cli.version", "Print the version."),
}
_PROCESSES = frozenset({"up", "node", "router"})
"""Commands that are processes: sysexits.h has their word for bad usage."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code and never raises."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if not word.startswith("-")), "")
    try:
        code = _run(words, command)
        sys.stdout.flush()
        return code
    except BatonError as error:
        if not isinstance(error, Cancelled):
            print(f"baton: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output went away; the interpreter must not trip over the same pipe when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.FAILED)


def _run(words: list[str], command: str) -> int:
    try:
        _build(command)(words, prog_name="baton")
    except SystemExit as end:
        code = int(end.code or 0) if isinstance(end.code, int | None) else int(ExitCode.FAILED)
        return int(ExitCode.BAD_USAGE) if code == ExitCode.USAGE and command in _PROCESSES else code
    return int(ExitCode.OK)


def _build(command: str) -> typer.Typer:
    """The application with the one command that will run; the others are there for the list in the help."""
    app = typer.Typer(
        help="Disaggregated prefill/decode serving for large language models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, (module, text) in _COMMANDS.items():
        if name == command:
            importlib.import_module(module).register(app, name, text)
        else:
            app.command(name, help=text)(_not_loaded)
    return app


def _not_loaded() -> None:
    raise AssertionError("a command ran that was not loaded")


if __name__ == "__main__":
    sys.exit(main())

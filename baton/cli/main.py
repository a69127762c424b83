"""The command `baton`: finds the subcommand, turns errors into one line on stderr and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any

import typer

from baton.cli.output import note
from baton.errors import BatonError, Cancelled, ExitCode

_COMMANDS = {
    "up": ("baton.cli.commands.up", "Start a cluster on this machine and keep it running."),
    "down": ("baton.cli.commands.down", "Let running requests end, then stop the cluster."),
    "status": ("baton.cli.commands.status", "Say whether the cluster serves: ok, degraded or unavailable."),
    "top": ("baton.cli.commands.top", "Show the cluster as it is now, again and again."),
    "get": ("baton.cli.commands.get", "List what the cluster has: nodes, requests, leases."),
    "describe": ("baton.cli.commands.describe", "Say all that is known of one thing: node, request."),
    "cordon": ("baton.cli.commands.cordon", "Give nodes no new requests."),
    "uncordon": ("baton.cli.commands.cordon", "Let nodes take new requests again."),
    "drain": ("baton.cli.commands.drain", "Let a node's work end, and give it none."),
    "set-role": ("baton.cli.commands.set_role", "Make a node a prefill or a decode node, under load."),
    "cache": ("baton.cli.commands.cache", "Forget what nodes keep for later prompts: reset."),
    "wait": ("baton.cli.commands.wait", "Wait until nodes are ready, idle, cordoned, ..."),
    "events": ("baton.cli.commands.events", "Say what became of the cluster."),
    "explain": ("baton.cli.commands.explain", "Say why a request went where it went, and what would have been best."),
    "trace": ("baton.cli.commands.trace", "Say where a request's time went, stage by stage."),
    "logs": ("baton.cli.commands.logs", "Print what the processes wrote, by time; -f goes on."),
    "generate": ("baton.cli.commands.generate", "Send a prompt and print what the model makes of it."),
    "chat": ("baton.cli.commands.chat", "Talk to the model; it knows what was said before."),
    "bench": ("baton.cli.bench.bench", "Measure: serve, compare, nodes, engine, handoff, router, scheduler; report."),
    "config": ("baton.cli.commands.config_view", "Look at the configuration: view."),
    "completion": ("baton.cli.commands.completion", "Print a completion script for bash, zsh or fish."),
    "doctor": ("baton.cli.commands.doctor", "Explain what this machine and installation can do, and what to fix."),
    "certs": ("baton.cli.commands.certs", "Make certificates: init."),
    "keys": ("baton.cli.commands.keys", "Say who may call: add, list, revoke."),
    "node": ("baton.cli.commands.processes", "Be a prefill node or a decode node."),
    "router": ("baton.cli.commands.processes", "Be a router."),
    "simulate": ("baton.cli.commands.simulate", "Run a cluster in virtual time: which arrangement, how many nodes."),
    "version": ("baton.cli.commands.version", "Print the version."),
}
_PROCESSES = frozenset({"up", "node", "router"})
"""Commands that are processes: sysexits.h has their words for bad usage and trouble with files."""
_ASK_NO_CLUSTER = _PROCESSES.union(
    ("bench", "certs", "completion", "config", "doctor", "down", "keys", "logs", "simulate", "version")
)
"""Commands that have no use for a key or a certificate."""
_BadUsage: type[Exception] = typer.BadParameter.__mro__[1]
"""What every complaint about a command line is. typer has it, but exports no name for it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code and never raises."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        words[0] = "version"
    command = next((word for word in words if not word.startswith("-")), "")
    is_process = command in _PROCESSES
    try:
        code = _run(words, command)
        sys.stdout.flush()
        return code
    except BatonError as error:
        if not isinstance(error, Cancelled):
            _complain(str(error))
        return int(error.exit_code)
    except _BadUsage as error:
        _explain_usage(error)
        return int(ExitCode.BAD_USAGE if is_process else ExitCode.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output went away, which is no story.
        _drop_output()
        return int(ExitCode.FAILED)
    except OSError as error:
        _drop_output()
        _complain(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        return int(ExitCode.IO_ERROR if is_process else ExitCode.FAILED)


def _run(words: list[str], command: str) -> int:
    return int(_build({command})(words, prog_name="baton", standalone_mode=False) or ExitCode.OK)


def command_tree() -> Any:
    """Every command with all of its options."""
    return typer.main.get_command(_build(_COMMANDS.keys()))


def _complain(text: str) -> None:
    note(f"baton: {' '.join(text.split())}")


def _explain_usage(error: Any) -> None:
    said = error.format_message()
    if "\n" in said:
        # A command that needs another word after it: the complaint is its help.
        note(said)
        return
    reason = said.removesuffix(".").replace(": Value error, ", ": ")
    where = error.ctx.command_path if error.ctx is not None else "baton"
    _complain(f"{reason}: see `{where} -h`")


def _drop_output() -> None:
    """The interpreter must not trip over the same output again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _build(loaded: Collection[str]) -> typer.Typer:
    """The application with the commands that are asked for; the others are there for the list in the help."""
    app = typer.Typer(
        help="Disaggregated prefill/decode serving for large language models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, (module, text) in _COMMANDS.items():
        if name in loaded:
            importlib.import_module(module).register(app, name, text)
            if name not in _ASK_NO_CLUSTER:
                importlib.import_module("baton.cli.access").give_access(app)
        else:
            app.command(name, help=text)(_not_loaded)
    return app


def _not_loaded() -> None:
    raise AssertionError("a command ran that was not loaded")


if __name__ == "__main__":
    sys.exit(main())

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
    "status": ("baton.cli.commands.status", "Print whether the cluster serves: ok, degraded or unavailable."),
    "top": ("baton.cli.commands.top", "Show the state of the cluster, updated continuously."),
    "get": ("baton.cli.commands.get", "List nodes, requests or leases of the cluster."),
    "describe": ("baton.cli.commands.describe", "Show all details of one node or request."),
    "cordon": ("baton.cli.commands.cordon", "Stop sending new requests to nodes."),
    "uncordon": ("baton.cli.commands.cordon", "Send new requests to nodes again."),
    "drain": ("baton.cli.commands.drain", "Cordon a node and wait until its running requests have ended."),
    "set-role": ("baton.cli.commands.set_role", "Change the role of a running node."),
    "cache": ("baton.cli.commands.cache", "Empty the prefix caches of nodes."),
    "wait": ("baton.cli.commands.wait", "Wait until nodes are ready, idle, cordoned, ..."),
    "events": (
        "baton.cli.commands.events",
        "List the events of the cluster: nodes that joined or left, failovers and more.",
    ),
    "explain": (
        "baton.cli.commands.explain",
        "Explain why a request went to its nodes, and which choice would have been best.",
    ),
    "trace": ("baton.cli.commands.trace", "Show where a request's time was spent, stage by stage."),
    "logs": ("baton.cli.commands.logs", "Print the logs of all processes in order of time."),
    "generate": ("baton.cli.commands.generate", "Send a prompt and print the generated text."),
    "chat": ("baton.cli.commands.chat", "Chat with the model."),
    "bench": ("baton.cli.bench.bench", "Benchmark a cluster or a part of it."),
    "config": ("baton.cli.commands.config_view", "Show the configuration."),
    "completion": ("baton.cli.commands.completion", "Print a completion script for bash, zsh or fish."),
    "doctor": ("baton.cli.commands.doctor", "Explain what this machine and installation can do, and what to fix."),
    "certs": ("baton.cli.commands.certs", "Make the certificates of a cluster."),
    "keys": ("baton.cli.commands.keys", "Add, list and revoke API keys."),
    "node": ("baton.cli.commands.processes", "Run one prefill node or decode node."),
    "router": ("baton.cli.commands.processes", "Run one router."),
    "simulate": (
        "baton.cli.commands.simulate",
        "Simulate a cluster in virtual time, to choose an arrangement and the number of nodes.",
    ),
    "version": ("baton.cli.commands.version", "Print the version."),
}
_PROCESSES = frozenset({"up", "node", "router"})
"""Commands that run as processes, which end with the exit codes of sysexits.h."""
_ASK_NO_CLUSTER = _PROCESSES.union(
    ("bench", "certs", "completion", "config", "doctor", "down", "keys", "logs", "simulate", "version")
)
"""Commands that call no cluster, and take no key or certificate."""
_BadUsage: type[Exception] = typer.BadParameter.__mro__[1]
"""The class of all errors about a command line, for which typer exports no name."""


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

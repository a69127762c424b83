"""The command `baton`: runs the subcommand, and turns an error into one line on stderr and an exit code."""

from __future__ import annotations

import difflib
import gc
import importlib
import io
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import typer

from baton.cli.output import print_note
from baton.errors import BatonError, Cancelled, ExitCode
from baton.processes.interpreter import rare_collections

_COMMANDS = {
    "demo": (
        "baton.cli.commands.up",
        "Start a cluster, send it prompts, show how each was served, and stop it.",
    ),
    "up": ("baton.cli.commands.up", "Start a cluster on this machine and keep it running."),
    "down": ("baton.cli.commands.up", "Stop the cluster after its running requests have ended."),
    "status": ("baton.cli.commands.status", "Print whether the cluster serves: ok, degraded or unavailable."),
    "top": ("baton.cli.commands.status", "Show the state of the cluster, updated continuously."),
    "get": ("baton.cli.commands.get", "List nodes, requests or leases of the cluster, or what its planner wants."),
    "describe": ("baton.cli.commands.describe", "Show all details of one node or request."),
    "cordon": ("baton.cli.commands.change_nodes", "Stop sending new requests to nodes."),
    "uncordon": ("baton.cli.commands.change_nodes", "Send new requests to nodes again."),
    "drain": ("baton.cli.commands.change_nodes", "Cordon a node and wait until its running requests have ended."),
    "move": ("baton.cli.commands.move", "Move a running stream to another decode node."),
    "set-role": ("baton.cli.commands.change_nodes", "Change the role of a running node."),
    "cache": ("baton.cli.commands.change_nodes", "Empty the prefix caches of nodes."),
    "wait": (
        "baton.cli.commands.change_nodes",
        "Wait until nodes are ready, idle, cordoned, drained or gone, or have a role.",
    ),
    "events": (
        "baton.cli.commands.status",
        "List the events of the cluster: nodes that joined or left, failovers and more.",
    ),
    "explain": (
        "baton.cli.commands.explain",
        "Explain why a request was placed on its nodes, and which placement would have been best.",
    ),
    "trace": ("baton.cli.commands.explain", "Show where a request's time was spent, stage by stage."),
    "logs": ("baton.cli.commands.logs", "Print the logs of all processes in order of time."),
    "generate": ("baton.cli.commands.generate", "Send a prompt and print the generated text."),
    "chat": ("baton.cli.commands.chat", "Chat with the model."),
    "bench": ("baton.cli.bench.bench", "Benchmark a cluster or a part of it."),
    "config": ("baton.cli.commands.doctor", "Show the configuration."),
    "completion": ("baton.cli.commands.completion", "Print a completion script for bash, zsh or fish."),
    "doctor": ("baton.cli.commands.doctor", "Check this machine and installation, and suggest fixes."),
    "certs": ("baton.cli.commands.keys", "Create the certificates of a cluster."),
    "keys": ("baton.cli.commands.keys", "Add, list and revoke API keys."),
    "lora": ("baton.cli.commands.lora", "Load, unload, list and inspect adapters (LoRA)."),
    "node": ("baton.cli.commands.processes", "Run one prefill node or decode node."),
    "router": ("baton.cli.commands.processes", "Run one router."),
    "simulate": (
        "baton.cli.commands.simulate",
        "Simulate a cluster in virtual time, to choose an arrangement and the number of nodes.",
    ),
    "version": ("baton.cli.commands.completion", "Print the version."),
}
_WITHOUT_ACCESS = frozenset(("up", "node", "router")).union(
    ("bench", "certs", "completion", "config", "demo", "doctor", "down", "keys", "logs", "simulate", "version")
)
"""Commands that call no cluster, and so take no API key or certificate."""
_BadUsage: type[Exception] = typer.BadParameter.__mro__[1]
"""The base class of errors about a command line, which typer does not export."""
_OTHER_NAMES = {"serve": "up", "start": "up", "run": "up", "launch": "up", "stop": "down", "ps": "status", "ls": "get"}
"""Names that other programs give to commands, and our names of these commands, which are not spelled alike."""
_MODEL_COMMANDS = ("up", "generate", "chat")
"""The commands that start a model or ask it: a flag of one is often given to another."""
_LEAST_SIMILARITY = 0.75
"""How similar a flag must be to the one that was typed to be suggested, as difflib's `ratio`, from 0 to 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises.

    `argv`: None for the command line of this process, which ends with the command.
    """
    try:
        return _exit_code(list(sys.argv[1:] if argv is None else argv))
    finally:
        if argv is None:
            # At its end the interpreter would collect garbage several times. That is a tenth of the time of a short
            # command, and takes seconds with all the objects of torch and transformers.
            gc.freeze()


def _exit_code(argv: list[str]) -> int:
    words = _as_documented(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal of another encoding shows ? for what it lacks.
        sys.stdout.reconfigure(errors="replace")
    command = next((word for word in words if not word.startswith("-")), "")
    try:
        code = _run(words, command)
        sys.stdout.flush()
        return code
    except BatonError as error:
        if not isinstance(error, Cancelled):
            _print_error(str(error))
        return int(error.exit_code)
    except _BadUsage as error:
        _explain_usage(error)
        return int(ExitCode.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output has ended, as `head` does; that is not worth a message.
        _drop_output()
        return int(ExitCode.FAILED)
    except OSError as error:
        _drop_output()
        _print_error(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        return int(ExitCode.FAILED)


def _as_documented(words: list[str]) -> list[str]:
    """Other spellings that other commands have taught: --version and -V, `help up`, `get node`."""
    match words:
        case ["--version" | "-V", *rest]:
            return ["version", *rest]
        case ["help", *rest]:
            return [*rest, "-h"]
        case ["get", "node" | "request" | "lease" as one, *rest]:
            return ["get", f"{one}s", *rest]
    return words


def _run(words: list[str], command: str) -> int:
    with rare_collections():
        tree = _tree({command})
    return int(tree(words, prog_name="baton", standalone_mode=False) or ExitCode.OK)


def command_tree() -> Any:
    """All commands with all of their options."""
    return _tree(_COMMANDS.keys())


def _tree(loaded: Collection[str]) -> Any:
    """All commands, of which those in `loaded` have their options and subcommands."""
    tree = typer.main.get_command(_build(loaded))
    _list_whole_summaries(tree)
    _refuse_nan(tree)
    return tree


def _list_whole_summaries(group: Any) -> None:
    """Let the help list the whole first sentence of each subcommand, which typer would cut to one line."""
    for command in getattr(group, "commands", {}).values():
        command.short_help = command.get_short_help_str(sys.maxsize)
        _list_whole_summaries(command)


def _refuse_nan(command: Any) -> None:
    """Let options with a range refuse NaN, of which typer finds that it is neither below nor above the range."""
    for subcommand in getattr(command, "commands", {}).values():
        _refuse_nan(subcommand)
    for parameter in command.params:
        if parameter.type.name == "float range":
            parameter.type.convert = _checked_for_nan(parameter.type.convert)


def _checked_for_nan(convert: Any) -> Any:
    def checked(value: Any, param: Any, ctx: Any) -> Any:
        number = convert(value, param, ctx)
        if math.isnan(number):
            raise typer.BadParameter(f"{value!r} is not a number", ctx, param)
        return number

    return checked


def _print_error(text: str) -> None:
    """Print an error as one line. What a server sent may be in it, so no control character reaches the terminal."""
    line = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in " ".join(text.split())
    )
    print_note(f"baton: {line}")


def _explain_usage(error: Any) -> None:
    message = explained(error, command_tree)
    if "\n" in message:
        # A group without a subcommand: the message is its help.
        print_note(message)
        return
    reason = message.removesuffix(".").replace(": Value error, ", ": ")
    command = error.ctx.command_path if error.ctx is not None else "baton"
    _print_error(f"{reason} See `{command} -h`" if reason.endswith("?") else f"{reason}: see `{command} -h`")


def _drop_output() -> None:
    """Discard further output, so that the interpreter does not fail on it again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _build(loaded: Collection[str]) -> typer.Typer:
    """The application with the commands in `loaded`. Of the others it has the names and texts that the help lists."""
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
            # Apart from the others at first, so that flags of access are added to this command alone.
            own = typer.Typer()
            importlib.import_module(module).register(own, name, text)
            if name not in _WITHOUT_ACCESS:
                importlib.import_module("baton.cli.target").add_access_flags(own)
            app.registered_commands += own.registered_commands
            app.registered_groups += own.registered_groups
        else:
            app.command(name, help=text)(_not_loaded)
    return app


def _not_loaded() -> None:
    raise AssertionError("a command was called whose module is not loaded")


def explained(error: Any, command_tree: Callable[[], Any]) -> str:
    """The message of typer's error about a command line, which suggests what was probably meant.

    `command_tree` gives all commands; it is called only if the flags of another command are wanted.
    """
    message = str(error.format_message())
    if error.ctx is None:
        return message
    unknown = re.match(r"No such command '([a-z-]+)'", message)
    if unknown is not None:
        return _of_unknown_command(unknown[1], message, error.ctx)
    option = getattr(error, "option_name", None)
    if option is not None and option.startswith("--"):
        return f"No such option: {option}.{_flag_meant(option, error.ctx, command_tree)}".removesuffix(".")
    if re.match(r"Got unexpected extra argument", message):
        return message.removesuffix(".") + _place_of_extra_words(error.ctx)
    return message


def _of_unknown_command(name: str, message: str, ctx: Any) -> str:
    if ctx.parent is None and name in _OTHER_NAMES:
        return f"No such command '{name}'. Did you mean `baton {_OTHER_NAMES[name]}`?"
    if "?" in message or ctx.parent is None:
        return message
    return f"No such command '{name}': `{ctx.command_path}` has {_listed(ctx.command.commands, 'and')}"


def _flag_meant(option: str, ctx: Any, command_tree: Callable[[], Any]) -> str:
    """A sentence that names the right flag of this command, or the command that has it; empty if none is like it."""
    own = _flags(ctx.command)
    if meant := _extended(option, own):
        return _question(meant)
    commands = command_tree().commands
    others = {name: _flags(commands[name]) for name in _MODEL_COMMANDS if f"baton {name}" != ctx.command_path}
    # The shortest one is the option itself, if another command has it.
    flag = min((flag for flags in others.values() for flag in _extended(option, flags)), key=len, default="")
    if not flag and (meant := difflib.get_close_matches(option, sorted(own), cutoff=_LEAST_SIMILARITY)):
        return _question(meant)
    having = [f"`baton {name}`" for name, flags in others.items() if flag in flags]
    return f" {'It' if flag == option else flag} belongs to {_listed(having, 'and')}" if flag else ""


def _flags(command: Any) -> set[str]:
    """All long flags that the help of a command lists."""
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    return {
        name for parameter in shown for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--")
    }


def _extended(option: str, flags: Iterable[str]) -> list[str]:
    """The flags that begin or end as `option` does: `--temperature` for `--temp`, `--grpc-port` for `--port`.

    Of two that begin alike only the shorter one: `--prefill` for `--prefil`, not `--prefill-tp`.
    """
    alike = [flag for flag in flags if flag.startswith(option) or flag.endswith(option[1:])]
    return sorted(flag for flag in alike if not any(flag != other and flag.startswith(other) for other in alike))


def _question(flags: Iterable[str]) -> str:
    return f" Did you mean {_listed([repr(flag) for flag in flags], 'or')}?"


def _listed(words: Iterable[str], last: str) -> str:
    """`a`, `a and b` or `a, b and c`."""
    *most, end = words
    return f"{', '.join(most)} {last} {end}" if most else end


def _place_of_extra_words(ctx: Any) -> str:
    """Where words were to go that the command does not take; empty if that is not known."""
    for word in ("PROMPT", "MESSAGE"):
        if any(word in parameter.human_readable_name for parameter in ctx.command.params):
            return f": put the {word.lower()} between quotes"
    if ctx.command_path == "baton up":
        return ": name a model with --model"
    return ""


if __name__ == "__main__":
    sys.exit(main())

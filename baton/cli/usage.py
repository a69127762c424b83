"""Suggests what was probably meant by a wrong command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

_OTHER_NAMES = {"serve": "up", "start": "up", "run": "up", "launch": "up", "stop": "down", "ps": "status", "ls": "get"}
"""Names that other programs give to commands, and our names of these commands, which are not spelled alike."""
_MODEL_COMMANDS = ("up", "generate", "chat")
"""The commands that start a model or ask it: a flag of one is often given to another."""
_LEAST_SIMILARITY = 0.75
"""How similar a flag must be to the one that was typed to be suggested, as difflib's `ratio`, from 0 to 1."""


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
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    return {name for one in shown for name in (*one.opts, *one.secondary_opts) if name.startswith("--")}


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
        if any(word in one.human_readable_name for one in ctx.command.params):
            return f": put the {word.lower()} between quotes"
    if ctx.command_path == "baton up":
        return ": name a model with --model"
    return ""

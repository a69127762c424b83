"""`baton completion`: prints a script that completes commands and options in a shell, without calling Baton."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from baton.cli.output import print_text


class Shell(enum.StrEnum):
    """A shell for which there is a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@dataclass(frozen=True, slots=True)
class Completions:
    """The words that may follow the beginning of a command line."""

    commands: Mapping[str, str]
    """Names of subcommands, with their help texts."""
    options: Mapping[str, Sequence[str]]
    """Options with their possible values; empty if an option takes any value or none."""
    arguments: Sequence[str]
    """Possible values of arguments."""


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(completion)


def completion(shell: Annotated[Shell, typer.Argument(help="The shell for which to print it.")]) -> None:
    """Print a completion script for a shell.

    bash: source <(baton completion bash). zsh: the same with zsh, after compinit. fish: baton completion fish | source
    """
    from baton.cli.main import command_tree

    tree = dict(completions_of(command_tree()))
    print_text(_fish(tree) if shell is Shell.FISH else _bash(tree, is_zsh=shell is Shell.ZSH))


def completions_of(command: Any, path: Sequence[str] = ()) -> Iterator[tuple[str, Completions]]:
    """Yield a command and all commands below it, each with the words that lead to it."""
    below: Mapping[str, Any] = getattr(command, "commands", {})
    options: dict[str, Sequence[str]] = {"--help": ()}
    arguments: list[str] = []
    for each in command.params:
        choices = _choices(each)
        if each.param_type_name == "argument":
            arguments += choices
        elif not each.hidden:
            flags = [flag for flag in (*each.opts, *each.secondary_opts) if flag.startswith("--")]
            options |= dict.fromkeys(flags, choices)
    texts = {name: each.get_short_help_str(200) for name, each in below.items()}
    yield " ".join(path), Completions(texts, options, arguments)
    for name, each in below.items():
        yield from completions_of(each, (*path, name))


def _choices(parameter: Any) -> Sequence[str]:
    """The possible values of an enum, or those in the metavar, such as `auto|on|off`; empty for any value."""
    if choices := getattr(parameter.type, "choices", ()):
        return [str(choice) for choice in choices]
    metavar = parameter.metavar or ""
    return metavar.split("|") if "|" in metavar and metavar.islower() else ()


def _bash(tree: Mapping[str, Completions], *, is_zsh: bool) -> str:
    lines = ["autoload -U +X bashcompinit && bashcompinit"] if is_zsh else []
    lines += [
        "_baton() {",
        '  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} path="" word',
        '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        '    case "${path:+$path }$word" in',
        f"      {'|'.join(_quoted(each) for each in tree if each)}) path=${{path:+$path }}$word ;;",
        "    esac",
        "  done",
        '  case "$path:$previous" in',
    ]
    for path, words in tree.items():
        for flag, choices in words.options.items():
            if choices:
                values = " ".join(choices)
                lines.append(f'    "{path}:{flag}") COMPREPLY=($(compgen -W "{values}" -- "$current")); return ;;')
    lines += ["  esac", '  case "$path" in']
    for path, words in tree.items():
        following = " ".join([*words.commands, *words.arguments, *words.options])
        lines.append(f'    "{path}") COMPREPLY=($(compgen -W "{following}" -- "$current")) ;;')
    lines += ["  esac", "}", "complete -o default -F _baton baton"]
    return "\n".join(lines)


def _quoted(path: str) -> str:
    return f'"{path}"'


def _fish(tree: Mapping[str, Completions]) -> str:
    lines = ["complete -c baton -f"]
    for path, words in tree.items():
        seen = path.split()
        inside = [f"__fish_seen_subcommand_from {word}" for word in seen]
        not_below = [f"not __fish_seen_subcommand_from {' '.join(words.commands)}"] if words.commands else []
        here = "; and ".join([*inside, *not_below]) or "__fish_use_subcommand"
        for name, text in words.commands.items():
            lines.append(f"complete -c baton -n {_fish_word(here)} -a {name} -d {_fish_word(text)}")
        lines += [f"complete -c baton -n {_fish_word(here)} -a {value}" for value in words.arguments]
        for flag, choices in words.options.items():
            values = f" -x -a {_fish_word(' '.join(choices))}" if choices else ""
            lines.append(f"complete -c baton -n {_fish_word(here)} -l {flag.removeprefix('--')}{values}")
    return "\n".join(lines)


def _fish_word(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

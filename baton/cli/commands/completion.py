"""`baton completion` prints a script that completes commands, options and names in a shell; `baton version`.

The script has all commands and options. Only for a name it runs another command, which asks the cluster; without a
cluster, or if that takes too long, no name is offered.
"""

from __future__ import annotations

import enum
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

import baton
from baton.cli.output import Format, OutputOption, print_json, print_text, print_yaml

_TIMEOUT = "--timeout 1"
_NODES = f"get nodes --no-headers {_TIMEOUT}"
"""Nodes with their roles, of which the script leaves out routers."""
_NODES_AND_ROUTERS = f"get nodes -o name {_TIMEOUT}"
_REQUESTS = f"get requests -o name {_TIMEOUT}"
_ADAPTERS = f"lora list -o name {_TIMEOUT}"
NAMES: Mapping[str, str] = {
    **dict.fromkeys(("cordon", "uncordon", "drain", "set-role", "wait", "cache reset"), _NODES),
    **dict.fromkeys(("describe node", "logs"), _NODES_AND_ROUTERS),
    **dict.fromkeys(("describe request", "explain", "move", "trace"), _REQUESTS),
    "move --to": _NODES,
    **dict.fromkeys(("lora unload", "generate --model", "chat --model"), _ADAPTERS),
}
"""The command that lists what an argument of a command, or an option of it, may name; the first word of a line."""
_ASK_FOR_NAMES = r"""
_baton_names() {
  local program=${COMP_WORDS[0]/#\~/$HOME} name role where=()
  [[ $current != -* ]] || return
  if [[ ${COMP_LINE-} =~ --(run-dir|address)[=\ ]+([^\ ]+) && -n ${BASH_REMATCH[2]-} ]]; then
    where=("--${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}")
  fi
  while read -r name role _; do
    [[ $role == router || $name != "$current"* ]] || COMPREPLY+=("$name")
  done < <("$program" "$@" "${where[@]}" 2>/dev/null </dev/null)
}""".strip()


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
    """Add one of the commands."""
    app.command(name, help=text)(completion if name == "completion" else version)


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
    for parameter in command.params:
        choices = _choices(parameter)
        if parameter.param_type_name == "argument":
            arguments += choices
        elif not parameter.hidden:
            flags = [flag for flag in (*parameter.opts, *parameter.secondary_opts) if flag.startswith("--")]
            options |= dict.fromkeys(flags, choices)
    texts = {name: subcommand.get_short_help_str(200) for name, subcommand in below.items()}
    yield " ".join(path), Completions(texts, options, arguments)
    for name, subcommand in below.items():
        yield from completions_of(subcommand, (*path, name))


def _choices(parameter: Any) -> Sequence[str]:
    """The possible values of an enum, or those in the metavar, such as `auto|on|off`; empty for any value."""
    if choices := getattr(parameter.type, "choices", ()):
        return [str(choice) for choice in choices]
    metavar = parameter.metavar or ""
    return metavar.split("|") if "|" in metavar and metavar.islower() else ()


def _bash(tree: Mapping[str, Completions], *, is_zsh: bool) -> str:
    lines = ["autoload -U +X bashcompinit && bashcompinit"] if is_zsh else []
    lines += [
        _ASK_FOR_NAMES,
        "_baton() {",
        '  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} path="" word',
        '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        '    case "${path:+$path }$word" in',
        f"      {'|'.join(_quoted(entry) for entry in tree if entry)}) path=${{path:+$path }}$word ;;",
        "    esac",
        "  done",
        '  case "$path:$previous" in',
    ]
    for path, words in tree.items():
        for flag, choices in words.options.items():
            if choices:
                values = " ".join(choices)
                lines.append(f'    "{path}:{flag}") COMPREPLY=($(compgen -W "{values}" -- "$current")); return ;;')
            elif names := NAMES.get(f"{path} {flag}"):
                lines.append(f'    "{path}:{flag}") COMPREPLY=(); _baton_names {names}; return ;;')
    lines += ["  esac", '  case "$path" in']
    for path, words in tree.items():
        following = " ".join([*words.commands, *words.arguments, *words.options])
        names = f"; _baton_names {NAMES[path]}" if path in NAMES else ""
        lines.append(f'    "{path}") COMPREPLY=($(compgen -W "{following}" -- "$current")){names} ;;')
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
        if path in NAMES:
            lines.append(f"complete -c baton -n {_fish_word(here)} -a {_fish_word(_fish_names(path))}")
        for flag, choices in words.options.items():
            values = f" -x -a {_fish_word(' '.join(choices))}" if choices else ""
            if f"{path} {flag}" in NAMES:
                values = f" -x -a {_fish_word(_fish_names(f'{path} {flag}'))}"
            lines.append(f"complete -c baton -n {_fish_word(here)} -l {flag.removeprefix('--')}{values}")
    return "\n".join(lines)


def _fish_names(where: str) -> str:
    words = NAMES[where].replace("--no-headers", "-o name")
    return f"(baton {words} 2>/dev/null)"


def _fish_word(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def version(output: OutputOption = Format.TEXT) -> None:
    """Print the version."""
    versions = {"version": baton.__version__, "python": platform.python_version(), "platform": platform.platform()}
    if output is Format.JSON:
        print_json(versions)
    elif output is Format.YAML:
        print_yaml(versions)
    else:
        print_text(f"baton {baton.__version__} (Python {versions['python']}, {versions['platform']})")

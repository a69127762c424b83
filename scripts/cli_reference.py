"""Renders docs/cli-reference.md from the commands and errors themselves. Run by scripts/cli_reference."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from generated_parts import keep

from baton import errors
from baton.cli.main import command_tree
from baton.errors import BatonError, TransferCause, TransferFailed
from router.http.errors import kind_of

PAGE = Path(__file__).parent.parent / "docs" / "cli-reference.md"
SETTINGS = frozenset({"up", "node", "router"})
"""Commands that have settings of a process as options; docs/configuration.md lists those."""
HEAD_OF_OPTIONS = ("option", "meaning")
SHARED_BY = 10
"""An option that at least this many commands have, with the same help, is listed once for all of them."""
HEAD = """\
# Reference of the command line

<!-- Rendered by scripts/cli_reference from the commands themselves. -->

Every command, its options as `baton COMMAND -h` shows them, and every error. How to use them: [cli.md](cli.md).
Commands that ask a cluster have the *shared options* in common:

"""
ABOUT_ERRORS = """
## Errors

How each error appears to a client of gRPC, to a client of HTTP and to a script ([cli.md](cli.md#errors) says more).

"""
WIDTH = 120
"""Columns of the page's prose."""
Row = tuple[str, str]


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields each command that is not a group, with its words after `baton`."""
    for name, command in group.commands.items():
        if getattr(command, "commands", None):
            yield from commands(command, (*path, name))
        elif not command.hidden:
            yield " ".join((*path, name)), command


def rows_of(command: Any) -> list[Row]:
    """Arguments and options of a command as its help shows them, without `--help` and settings."""
    context = command.make_context("baton", [], resilient_parsing=True)
    shown = [parameter for parameter in command.params if getattr(parameter, "rich_help_panel", None) is None]
    records = (parameter.get_help_record(context) for parameter in shown)
    return [(names, " ".join(text.split())) for names, text in filter(None, records)]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is formatted as code."""
    lines = [head, ["---"] * len(head), *([f"`{first}`", *rest] for first, *rest in rows)]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in escaped)


def error_rows() -> Iterator[tuple[str, ...]]:
    """Yields each error that a request or a command may end with: its name, codes, and the first paragraph about it."""
    for name, kind in vars(errors).items():
        if not (isinstance(kind, type) and issubclass(kind, BatonError)) or kind is BatonError:
            continue
        if kind is TransferFailed:
            http = "503 `kv_transfer_CAUSE`"
        else:
            shown = kind_of(kind.__new__(kind))
            http = f"{shown.status} `{shown.code or shown.type}`"
        meaning = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        if kind is TransferFailed:
            meaning += f" CAUSE is one of {', '.join(cause.value for cause in TransferCause)}."
        retried = "yes" if kind.retryable else "no"
        yield name, kind.status.value, http, str(int(kind.exit_code)), retried, meaning


def render() -> str:
    """The page: the options that many commands have, the commands by their names, and the errors."""
    by_name = dict(sorted(commands(command_tree())))
    rows = {name: rows_of(command) for name, command in by_name.items()}
    count = Counter(row for name in by_name if name not in SETTINGS for row in rows[name])
    shared = [row for row, times in count.items() if times >= SHARED_BY and not row[0].startswith("-o")]
    sections = (section(name, command, rows[name], shared) for name, command in by_name.items())
    heads = ("error", "gRPC status", "HTTP status, code or type", "exit code", "retryable", "meaning")
    return HEAD + table(HEAD_OF_OPTIONS, shared) + "".join(sections) + ABOUT_ERRORS + table(heads, error_rows())


def section(name: str, command: Any, rows: Sequence[Row], shared: Sequence[Row]) -> str:
    """What `baton NAME -h` says: what the command does, how it is called, and its options."""
    words = " ".join(command.collect_usage_pieces(command.make_context("baton", [], resilient_parsing=True)))
    about = fill(" ".join(command.help.split()), WIDTH, break_on_hyphens=False, break_long_words=False)
    text = f"\n## baton {name}\n\n{about}\n\nUsage: `baton {name} {words}`\n"
    if name in SETTINGS:
        text += "\nIts options are [settings](configuration.md), and these:\n"
    if own := [row for row in rows if row not in shared]:
        text += f"\n{table(HEAD_OF_OPTIONS, own)}"
    if common := ", ".join(f"`{row[0].split()[0]}`" for row in rows if row in shared):
        text += f"\nShared options: {common}.\n"
    return text


def main() -> int:
    """Writes the page; with `--check` compares it and returns 1 if it is out of date."""
    return keep(PAGE, render(), only_compare="--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

"""Renders the help of each command, and the table of errors, into docs/cli.md. Run by scripts/cli_reference."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markers import names_in, rendered

from baton import errors
from baton.cli.main import command_tree
from baton.errors import BatonError, TransferCause, TransferFailed
from router.http.errors import kind_of

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
SETTINGS = frozenset({"up", "node", "router"})
"""Commands that have settings of a process as options; docs/configuration.md lists those."""
HEAD_OF_OPTIONS = ("option", "meaning")
SHARED_BY = 10
"""An option that at least this many commands have, with the same help, is listed once for all of them."""
Row = tuple[str, str]


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields each command that is not a group, with its words after `baton`."""
    for name, command in group.commands.items():
        if getattr(command, "commands", None):
            yield from commands(command, (*path, name))
        elif not command.hidden:
            yield " ".join((*path, name)), command


def rows(command: Any) -> list[Row]:
    """Arguments and options of a command as its help shows them, without `--help` and settings."""
    context = command.make_context("baton", [], resilient_parsing=True)
    shown = [parameter for parameter in command.params if getattr(parameter, "rich_help_panel", None) is None]
    records = (parameter.get_help_record(context) for parameter in shown)
    return [(names, " ".join(text.split())) for names, text in filter(None, records)]


def table(head: Sequence[str], found: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is formatted as code."""
    lines = [head, ["---"] * len(head), *([f"`{first}`", *rest] for first, *rest in found)]
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


def reference(found: Mapping[str, Any]) -> dict[str, str]:
    """The generated part of each command, and one named `shared` for the options that many commands have."""
    all_rows = {name: rows(command) for name, command in found.items()}
    count = Counter(row for name, command_rows in all_rows.items() if name not in SETTINGS for row in command_rows)
    shared = [row for row, times in count.items() if times >= SHARED_BY and not row[0].startswith("-o")]
    texts = {"shared": table(HEAD_OF_OPTIONS, shared)}
    for name, command in found.items():
        words = " ".join(command.collect_usage_pieces(command.make_context("baton", [], resilient_parsing=True)))
        texts[name] = f"{' '.join(command.help.split())}\n\n```text\nbaton {name} {words}\n```\n"
        if name in SETTINGS:
            texts[name] += "\nIts options are settings, and these:\n"
        own = [row for row in all_rows[name] if row not in shared]
        if own:
            texts[name] += f"\n{table(HEAD_OF_OPTIONS, own)}"
        if len(own) < len(all_rows[name]):
            names = ", ".join(f"`{row[0].split()[0]}`" for row in all_rows[name] if row in shared)
            texts[name] += f"\nShared options: {names}.\n"
    return texts


def main() -> int:
    """Writes the page, or compares it with `--check`; returns 1 if a command has no place or the page is outdated."""
    before = PAGE.read_text(encoding="utf-8")
    texts, places = reference(dict(commands(command_tree()))), names_in(before, "command")
    texts["errors"] = table(
        ("error", "gRPC status", "HTTP status, code or type", "exit code", "retryable", "meaning"), error_rows()
    )
    if missing := [name for name in texts if name not in places]:
        print(f"scripts/cli_reference: docs/cli.md has no place for {', '.join(missing)}", file=sys.stderr)
        return 1
    if gone := [name for name in places if name not in texts]:
        print(f"scripts/cli_reference: docs/cli.md describes {', '.join(gone)}, which baton lacks", file=sys.stderr)
        return 1
    after = rendered(before, "command", texts)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(after, encoding="utf-8")
    elif after != before:
        print("scripts/cli_reference: docs/cli.md is out of date; run scripts/cli_reference", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

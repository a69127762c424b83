"""Prints a list and then the items that change, until Ctrl-C (`-w` of the commands that list things)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import typer

from baton.cli.output import ListFormat, print_item, print_note, print_text
from baton.errors import DeadlineExceeded, Unreachable

_POLL_INTERVAL_S = 1.0

WatchOption = Annotated[bool, typer.Option("-w", "--watch", help="Keep printing what changes, until Ctrl-C.")]


@dataclass(frozen=True, slots=True)
class WatchedItem:
    """One item of a list."""

    key: str
    """Identifies the item as long as it exists."""
    state: object
    """What is compared to find changes. It does not contain the age."""
    cells: Sequence[str]
    document: Mapping[str, Any]
    """The item as a JSON object."""


def changed_items(known: Mapping[str, object], items: Sequence[WatchedItem]) -> list[WatchedItem]:
    """The items that are new or whose state has changed."""
    return [item for item in items if item.key not in known or known[item.key] != item.state]


class GrowingTable:
    """Formats the lines of a table whose later rows are not known. A column can become wider, but never narrower."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._widths = [len(column) for column in columns]

    def widen(self, rows: Sequence[Sequence[str]]) -> None:
        """Make the columns wide enough for these rows."""
        for row in rows:
            self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]

    def line(self, cells: Sequence[str]) -> str:
        """The cells as a padded line."""
        return "   ".join(cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True)).rstrip()


def watch(
    fetch: Callable[[Collection[str]], Sequence[WatchedItem]],
    columns: Sequence[str],
    output: ListFormat,
    *,
    headers: bool,
    retries: bool,
) -> NoReturn:
    """Print all items that `fetch` returns, then once a second those that have changed.

    JSON is one document a line. `fetch` takes the keys of the items that it returned before. With `retries`, a cluster
    that has answered once is asked again when it does not answer any more. Raises the errors of `fetch`.
    """
    table, known, is_lost = GrowingTable(columns), dict[str, object](), False
    has_answered = False
    while True:
        try:
            items = fetch(known.keys())
        except (Unreachable, DeadlineExceeded) as error:
            if not (has_answered and retries):
                raise
            if not is_lost:
                print_note(f"baton: {error}; asking again")
            is_lost = True
        else:
            is_lost, changes = False, changed_items(known, items)
            table.widen([item.cells for item in changes])
            if not has_answered and headers and output in (ListFormat.TABLE, ListFormat.WIDE):
                print_text(table.line(columns))
            for item in changes:
                print_item(output, item.document, item.cells[0], table.line(item.cells))
            known, has_answered = {item.key: item.state for item in items}, True
        time.sleep(_POLL_INTERVAL_S)

"""`-w` of lists: everything as it is, and then what changes, as it changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import typer

from baton.cli.output import VERSION, ListFormat, note, print_yaml, say
from baton.errors import DeadlineExceeded, Unreachable

_LOOK_EVERY_S = 1.0

WatchOption = Annotated[bool, typer.Option("-w", "--watch", help="Go on with what changes, until Ctrl-C.")]


@dataclass(frozen=True, slots=True)
class Listed:
    """One thing of a list."""

    key: str
    """Names it for as long as it is there."""
    state: object
    """It has changed when this has: not when it has only become older."""
    cells: Sequence[str]
    document: Mapping[str, Any]
    """As JSON."""


def changed(known: Mapping[str, object], found: Sequence[Listed]) -> list[Listed]:
    """What is new, or is not as it was. Pure."""
    return [each for each in found if each.key not in known or known[each.key] != each.state]


class Rows:
    """Lines of a table whose end is not known: a column becomes wider, but never narrower."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._widths = [len(column) for column in columns]

    def make_room(self, rows: Sequence[Sequence[str]]) -> None:
        """For lines that will come."""
        for row in rows:
            self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]

    def line(self, cells: Sequence[str]) -> str:
        """Padded."""
        return "   ".join(cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True)).rstrip()


def watch(
    look: Callable[[Collection[str]], Sequence[Listed]],
    columns: Sequence[str],
    output: ListFormat,
    *,
    headers: bool,
    comes_back: bool,
) -> NoReturn:
    """Print what `look` finds, then what has changed, again and again; json is one document a line.

    `look` is given the keys of what it found before. `comes_back`: who does not answer any more is asked again, once it
    has answered. Raises what `look` raises.
    """
    rows, known, is_lost = Rows(columns), dict[str, object](), False
    has_begun = False
    while True:
        try:
            found = look(known.keys())
        except (Unreachable, DeadlineExceeded) as error:
            if not (has_begun and comes_back):
                raise
            if not is_lost:
                note(f"baton: {error}; asking again")
            is_lost = True
        else:
            is_lost, news = False, changed(known, found)
            rows.make_room([each.cells for each in news])
            if not has_begun and headers and output in (ListFormat.TABLE, ListFormat.WIDE):
                say(rows.line(columns))
            for each in news:
                _print(each, rows, output)
            known, has_begun = {each.key: each.state for each in found}, True
        time.sleep(_LOOK_EVERY_S)


def _print(each: Listed, rows: Rows, output: ListFormat) -> None:
    if output is ListFormat.JSON:
        say(json.dumps({"version": VERSION, **each.document}, ensure_ascii=False))
    elif output is ListFormat.YAML:
        say("---")
        print_yaml({"version": VERSION, **each.document})
    elif output is ListFormat.NAME:
        say(each.cells[0])
    else:
        say(rows.line(each.cells))

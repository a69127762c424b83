"""Prints results: tables for people; JSON, YAML and names for programs, with nothing else on stdout."""

from __future__ import annotations

import enum
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from baton.observe.terminal_text import shown

VERSION = 1
"""Version of the JSON and YAML that commands print. It changes when a field is removed or gets another meaning."""


class Format(enum.StrEnum):
    """The values of -o of commands that print one object."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


class ListFormat(enum.StrEnum):
    """The values of -o of commands that print a list."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


OUTPUT_OPTION = typer.Option("-o", "--output", help="Output format.")
OutputOption = Annotated[Format, OUTPUT_OPTION]
ListOutputOption = Annotated[ListFormat, OUTPUT_OPTION]
NoHeadersOption = Annotated[bool, typer.Option("--no-headers", help="Print no header line.")]


def print_json(value: Any) -> None:
    """Print one JSON document."""
    print(shown(json.dumps(value, indent=2, ensure_ascii=False, default=str)))  # noqa: T201


def print_yaml(value: Any) -> None:
    """Print one YAML document."""
    from baton.cli.yaml_text import yaml_text

    print(shown(yaml_text(value)), end="")  # noqa: T201


def print_document(output: Format, document: Mapping[str, Any]) -> None:
    """Print one object with the version of its fields, as YAML or else as JSON."""
    (print_yaml if output is Format.YAML else print_json)({"version": VERSION, **document})


def print_result(output: Format, document: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Print one object: its lines as text, or else its document."""
    if output is not Format.TEXT:
        print_document(output, document)
    else:
        for line in lines:
            print_text(line)


def print_list(
    output: ListFormat,
    documents: Iterable[Any],
    names: Iterable[str],
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    headers: bool,
) -> None:
    """Print a list in the format `output`.

    Of `documents`, `names` and `rows` only the one that this format needs is consumed, so they may be generators.
    """
    if output is ListFormat.JSON:
        print_json({"version": VERSION, "items": list(documents)})
    elif output is ListFormat.YAML:
        print_yaml({"version": VERSION, "items": list(documents)})
    elif output is ListFormat.NAME:
        for name in names:
            print_text(name)
    else:
        print_table(columns, list(rows), headers=headers)


def print_item(output: ListFormat, document: Mapping[str, Any], name: str, row: str) -> None:
    """Print one item of a list that grows, in the format `output`: JSON is one document a line."""
    if output is ListFormat.JSON:
        print_text(json.dumps({"version": VERSION, **document}, ensure_ascii=False))
    elif output is ListFormat.YAML:
        print_text("---")
        print_yaml({"version": VERSION, **document})
    else:
        print_text(name if output is ListFormat.NAME else row)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, headers: bool = True, gap: int = 3) -> None:
    """Print left-aligned columns `gap` spaces apart, as kubectl does, without borders and colours."""
    for line in table_lines(columns, rows, headers=headers, gap=gap):
        print(line)  # noqa: T201


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, headers: bool = True, gap: int = 3
) -> list[str]:
    """The lines that `print_table` prints."""
    cells = [[shown(cell) for cell in row] for row in rows]
    lines = [list(columns), *cells] if headers else cells
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(columns))]
    return [
        (" " * gap).join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]


def print_text(text: str = "", *, end: str = "\n") -> None:
    """Print a result as text on stdout, at once. It may be of others: see `shown`."""
    print_as_is(shown(text), end=end)


def print_answer(text: str = "", *, end: str = "\n") -> None:
    """Print what a model has written: for a file or a program as it is."""
    (print_text if sys.stdout.isatty() else print_as_is)(text, end=end)


def print_as_is(text: str, *, end: str = "\n") -> None:
    """Print a text that no terminal obeys, or that has Baton's own colours, on stdout, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def print_note(text: str) -> None:
    """Print a message that is not part of the result on stderr, at once."""
    sys.stderr.write(shown(text) + "\n")
    sys.stderr.flush()


def duration(seconds: float) -> str:
    """Seconds as text with one or two units: `42s`, `3m12s`, `5h07m`, `2d4h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def fine_duration(seconds: float) -> str:
    """Seconds as text like `duration`, but with tenths below ten seconds: `0.3s`."""
    return f"{max(0.0, seconds):.1f}s" if seconds < 9.95 else duration(seconds)


def size(count: int) -> str:
    """A number of bytes as text with a binary unit: `1.5 MiB`."""
    value, units = float(count), ("B", "KiB", "MiB", "GiB", "TiB")
    rank = 0 if count < 1 else min(int(math.log2(count) // 10), len(units) - 1)
    return f"{count} B" if rank == 0 else f"{value / 1024**rank:.1f} {units[rank]}"

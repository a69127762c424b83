"""How results are printed: tables for people; JSON, YAML and names for programs, clean of everything else."""

from __future__ import annotations

import enum
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

VERSION = 1
"""Of what commands print as JSON and YAML: it changes when a field goes, or means something else."""


class Format(enum.StrEnum):
    """-o of commands that print one thing."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


class ListFormat(enum.StrEnum):
    """-o of commands that print a list."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


def print_json(value: Any) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))  # noqa: T201


def print_yaml(value: Any) -> None:
    """One YAML document."""
    from baton.cli.yaml_text import yaml_text

    print(yaml_text(value), end="")  # noqa: T201


def print_list(
    output: ListFormat,
    documents: Iterable[Any],
    names: Iterable[str],
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    headers: bool,
) -> None:
    """What is in a list, once, in the form that was asked for; of the others nothing is made if they are generators."""
    if output is ListFormat.JSON:
        print_json({"version": VERSION, "items": list(documents)})
    elif output is ListFormat.YAML:
        print_yaml({"version": VERSION, "items": list(documents)})
    elif output is ListFormat.NAME:
        for name in names:
            say(name)
    else:
        print_table(columns, list(rows), headers=headers)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, headers: bool = True, gap: int = 3) -> None:
    """Left-aligned columns `gap` spaces apart, as kubectl prints them: nothing a shell would stumble on."""
    for line in table_lines(columns, rows, headers=headers, gap=gap):
        print(line)  # noqa: T201


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, headers: bool = True, gap: int = 3
) -> list[str]:
    """What `print_table` prints."""
    lines = [list(columns), *map(list, rows)] if headers else list(map(list, rows))
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(columns))]
    return [
        (" " * gap).join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]


def say(text: str = "", *, end: str = "\n") -> None:
    """Text for a person, or a program that asked for text, on stdout."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def note(text: str) -> None:
    """Something beside the result, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def duration(seconds: float) -> str:
    """`42s`, `3m12s`, `5h07m`, `2d4h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def fine_duration(seconds: float) -> str:
    """Like `duration`, but with tenths below ten seconds, as what lives for moments needs them: `0.3s`."""
    return f"{max(0.0, seconds):.1f}s" if seconds < 9.95 else duration(seconds)


def size(count: int) -> str:
    """Bytes with a binary unit, like `1.5 MiB`."""
    value, units = float(count), ("B", "KiB", "MiB", "GiB", "TiB")
    rank = 0 if count < 1 else min(int(math.log2(count) // 10), len(units) - 1)
    return f"{count} B" if rank == 0 else f"{value / 1024**rank:.1f} {units[rank]}"

"""What users see from outside, as text files in tests/outside.

A test compares what it sees with its file. With BATON_OUTSIDE=write in the environment it writes the file instead, as
`scripts/outside` runs it.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "outside"


def write(name: str, text: str) -> None:
    """Writes one file; `name` is relative to tests/outside."""
    path = FOLDER / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="")


def difference(name: str, text: str) -> str:
    """The unified diff from the file to the text; empty if they are equal."""
    path = FOLDER / name
    frozen = path.read_bytes().decode() if path.exists() else ""
    old, new = (each.splitlines(keepends=True) for each in (frozen, text))
    return "".join(difflib.unified_diff(old, new, f"tests/outside/{name}", "now"))


def assert_as_frozen(name: str, text: str) -> None:
    """Fails with the difference if the text is not that of the file."""
    if os.environ.get("BATON_OUTSIDE") == "write":
        write(name, text)
    if changed := difference(name, text):
        pytest.fail(f"users see a change; scripts/outside writes it down if it is meant\n{changed}", pytrace=False)


def assert_result_as_frozen(result: Mapping[str, Any], name: str = "") -> None:
    """Compares the keys and types of a benchmark's result, as JSON has them, with the file `name`, or of its kind."""
    written: dict[str, Any] = json.loads(json.dumps(result, allow_nan=False))
    # Which packages are there depends on the machine.
    assert_as_frozen(f"results/{name or written['kind']}.txt", _outline(written | {"versions": {}}))


def _outline(value: object) -> str:
    """A line for each path of keys in a JSON document, with the JSON types of what is there; `[]`: in each element."""
    kinds: dict[str, set[str]] = {}
    for path, kind in _kinds(value, ""):
        kinds.setdefault(path, set()).add(kind)
    return "".join(f"{path or '.'}: {' or '.join(sorted(found))}\n" for path, found in sorted(kinds.items()))


def _kinds(value: object, path: str) -> Iterator[tuple[str, str]]:
    match value:
        case dict():
            yield path, "object"
            for key, inner in value.items():
                yield from _kinds(inner, f"{path}.{key}")
        case list():
            yield path, "array"
            for inner in value:
                yield from _kinds(inner, f"{path}[]")
        case None:
            yield path, "null"
        case bool():
            yield path, "boolean"
        case str():
            yield path, "string"
        case _:
            yield path, "number"

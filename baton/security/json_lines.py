"""The lines of a JSON text on which its values begin, for messages about files that people write."""

from __future__ import annotations

import json
from collections.abc import Mapping

_SPACE = " \t\r\n"
Path = tuple[str | int, ...]


def lines_of_values(text: str) -> Mapping[Path, int]:
    """The line, counted from 1, of each value by its path of keys and indexes. `text`: valid JSON.

    Raises RecursionError for values that are nested as deep as Python calls may be.
    """
    lines: dict[Path, int] = {}
    counted, line = 0, 1  # the line of this position; values are walked in their order
    decoder = json.JSONDecoder()

    def skip(at: int, more: str = "") -> int:
        while at < len(text) and text[at] in _SPACE + more:
            at += 1
        return at

    def walk(at: int, path: Path) -> int:
        """Note the value that begins here, and return where it has ended."""
        nonlocal counted, line
        line += text.count("\n", counted, at)
        counted, lines[path] = at, line
        if text[at] not in "{[":
            return decoder.raw_decode(text, at)[1]
        is_object, index = text[at] == "{", 0
        at = skip(at + 1)
        while text[at] not in "}]":
            name: str | int = index
            if is_object:
                name, at = decoder.raw_decode(text, at)
                at = skip(at, ":")
            at = skip(walk(at, (*path, name)), ",")
            index += 1
        return at + 1

    walk(skip(0), ())
    return lines

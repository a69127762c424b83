"""Builds grammars in Lark's notation as llguidance reads it, part by part.

llguidance splits an output into terminals (regular expressions), each as long as it can be, before it matches rules. So
`/[a-z]+/ "end"` as two terminals would never end: the first takes all letters. Here what is regular and stands side by
side becomes one terminal, which matches exactly what its parts say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a grammar."""

    text: str
    """An expression that may stand inside any other."""
    is_regular: bool
    """Whether it may be a part of a terminal."""
    is_single: bool = True
    """Whether a rule takes it as one terminal, or it is no terminal."""


EMPTY = Part('""', is_regular=True)


def literal(text: str) -> Part:
    """Exactly this text."""
    return Part(json.dumps(text), is_regular=True)


def pattern(regex: str) -> Part:
    """What a regular expression matches."""
    escaped, chars = [], iter(regex)
    for char in chars:
        if char == "\\":
            escaped.append(char + next(chars, ""))
        else:
            escaped.append({"/": r"\/", "\n": r"\n"}.get(char, char))
    return Part(f"/{''.join(escaped)}/", is_regular=True)


def both(part: Part, other: Part) -> Part:
    """What each of two regular parts matches."""
    return Part(f"({part.text} & {other.text})", is_regular=True, is_single=False)


def all_but(part: Part) -> Part:
    """What a regular part does not match."""
    return Part(f"(~{part.text})", is_regular=True, is_single=False)


ANY_TEXT = pattern("(?s:.*)")


class LarkGrammar:
    """A grammar in the making. Its parts are for it alone."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._num_names = 0

    def text(self, start: Part) -> str:
        """The whole grammar, whose outputs are those of `start`."""
        return "\n".join([f"start: {self._in_rule(start)}", *self._lines])

    def sequence(self, parts: Sequence[Part]) -> Part:
        """One part after the other."""
        if not parts:
            return EMPTY
        if len(parts) == 1:
            return parts[0]
        if all(part.is_regular for part in parts):
            return Part(f"({' '.join(part.text for part in parts)})", is_regular=True, is_single=False)
        found: list[str] = []
        for is_regular, neighbours in groupby(parts, lambda part: part.is_regular):
            if is_regular:
                found.append(self._in_rule(self.sequence(list(neighbours))))
            else:
                found += [part.text for part in neighbours]
        return Part(f"({' '.join(found)})", is_regular=False)

    def choice(self, parts: Sequence[Part]) -> Part:
        """One of the parts."""
        if len(parts) == 1:
            return parts[0]
        if all(part.is_regular for part in parts):
            return Part(f"({' | '.join(part.text for part in parts)})", is_regular=True, is_single=False)
        return Part(f"({' | '.join(map(self._in_rule, parts))})", is_regular=False)

    def repeated(self, part: Part, least: int, most: int | None) -> Part:
        """The part several times; `most` None: without a limit."""
        often = f"{{{least},{'' if most is None else most}}}"
        if part.is_regular:
            return Part(f"({part.text}){often}", is_regular=True, is_single=False)
        return Part(f"({part.text}){often}", is_regular=False)

    def shared(self, part: Part) -> Part:
        """The same part by a name, so that the grammar does not grow with each use of it."""
        if part.is_regular:
            return Part(self._defined("TERMINAL", f": {part.text}").text, is_regular=True)
        return self._defined("rule", f": {part.text}")

    def text_until(self, end: Part) -> Part:
        """Any text up to the first place at which this regular part fits, and what fits there."""
        return self.shortest(self.sequence([ANY_TEXT, end]))

    def shortest(self, part: Part) -> Part:
        """What a regular part matches, up to the first place at which it does."""
        return self._defined("lazy", f"[lazy]: {part.text}")

    def json(self, schema: str) -> Part:
        """JSON that fits a schema."""
        return self._defined("json", f": %json {schema}")

    def named(self, name: str, part: Part) -> None:
        """Define a rule or, for a name in capital letters, a terminal."""
        self._lines.append(f"{name}: {part.text if name.isupper() else self._in_rule(part)}")

    def _defined(self, kind: str, definition: str) -> Part:
        self._num_names += 1
        name = f"{kind}_{self._num_names}"
        self._lines.append(name + definition)
        return Part(name, is_regular=False)

    def _in_rule(self, part: Part) -> str:
        if not part.is_regular or part.is_single:
            return part.text
        return self._defined("TERMINAL", f": {part.text}").text

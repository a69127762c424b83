"""Patterns of modules' names in an adapter's settings: as PEFT applies them, in a bounded time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

LONGEST = 128
"""Characters of a pattern, and of a module's name."""
MOST_PATTERNS = 4096
_MOST_EXPRESSIONS = 64
"""Patterns that are regular expressions, which are tried for each module."""
_MOST_REPEATS = 1
_MOST_BRANCHINGS = 2
"""Repeats and groups of an expression: each multiplies the time that a name may take."""
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_EXPRESSION = re.compile(r"(?:[A-Za-z0-9_.|^$-]|\\[.dw]|\[[A-Za-z0-9_-]+\]|[()]|(?<![()*+?])[*+?](?![*+?]))+")

T = TypeVar("T")


class UnsoundPattern(Exception):
    """A pattern is none, or could take long; the message says so behind the setting's name."""


class NamePatterns(Generic[T]):
    """Values of modules by patterns of their names, of which the first one that matches counts."""

    def __init__(self, values: Mapping[str, T]) -> None:
        """Raises UnsoundPattern."""
        expressions = [pattern for pattern in values if not _PLAIN.fullmatch(pattern)]
        if len(values) > MOST_PATTERNS:
            raise UnsoundPattern(f"has more than {MOST_PATTERNS} patterns; set the values that most modules have once")
        if len(expressions) > _MOST_EXPRESSIONS:
            raise UnsoundPattern(f"has more than {_MOST_EXPRESSIONS} regular expressions; name the modules")
        self._values = dict(values)
        self._expressions = {pattern: _compiled(pattern) for pattern in expressions}

    def items(self) -> Iterator[tuple[str, T]]:
        """The patterns and their values, in their order."""
        return iter(self._values.items())

    def value_of(self, module: str, otherwise: T) -> T:
        """The value of the first pattern that matches a module's name, or the end of it from one of its parts on."""
        for pattern, value in self._values.items():
            expression = self._expressions.get(pattern)
            if _ends_with(module, pattern) if expression is None else expression.match(module):
                return value
        return otherwise


def _compiled(pattern: str) -> re.Pattern[str]:
    repeats = sum(pattern.count(sign) for sign in "*+?")
    if (
        len(pattern) > LONGEST
        or repeats > _MOST_REPEATS
        or repeats + pattern.count("(") > _MOST_BRANCHINGS
        or not _EXPRESSION.fullmatch(pattern)
    ):
        raise UnsoundPattern(f"has the pattern {pattern!r:.60}, which is too complex; name the modules")
    try:
        re.compile(pattern)
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsoundPattern(f"has the pattern {pattern!r:.60}, which is none ({error})") from error


def _ends_with(module: str, pattern: str) -> bool:
    """Whether a name matches a pattern without signs other than the dot, which stands for any character."""
    before = len(module) - len(pattern)
    if before < 0 or (before and module[before - 1] != "."):
        return False
    return all(wanted in (found, ".") for found, wanted in zip(module[before:], pattern, strict=True))

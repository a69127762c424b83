"""Fields that are accepted and have no effect: an answer's header names those that its request had."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar

HEADER = b"x-baton-ignored-fields"
_names: ContextVar[set[str] | None] = ContextVar("ignored_fields", default=None)


def collect_ignored() -> set[str]:
    """A set for the names of ignored fields of the bodies that are read from now on in this context, by any thread."""
    names = set[str]()
    _names.set(names)
    return names


def note_ignored(fields: Iterable[str]) -> None:
    """Add names of fields that were sent and are ignored; they are some of the known ones, so they are few."""
    if (names := _names.get()) is not None:
        names.update(fields)

"""Writes the effects of the lease and transfer books as text, one line each, so that a test shows a conversation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from baton.messages.ids import AttemptKey
from kv_transfer.effects import Recorded

_OF_WHOLE_BLOCKS = [("digest_parts", 1), ("group", 0), ("local_parts", 1), ("remote_parts", 1), ("partly_filled", ())]
"""Fields that have these values where blocks are moved whole, and are then left out."""


def lines(effects: Iterable[Any]) -> list[str]:
    """Return one line for each effect. `Recorded` effects are left out; they have their own tests."""
    return [_line(effect) for effect in effects if not isinstance(effect, Recorded)]


def names(effects: Iterable[Any]) -> list[str]:
    """Return the names of the `Recorded` effects."""
    return [effect.name for effect in effects if isinstance(effect, Recorded)]


def _line(value: Any) -> str:
    named = ((field.name, getattr(value, field.name)) for field in fields(value))
    words = [_word(content) for name, content in named if (name, content) not in _OF_WHOLE_BLOCKS]
    return " ".join([type(value).__name__, *words])


def _word(value: Any) -> str:
    match value:
        case AttemptKey():
            return str(value)
        case tuple() | list():
            return "[" + ", ".join(_word(item) for item in value) + "]"
        case bool() | int() | str() | None:
            return str(value)
        case _ if is_dataclass(value):
            return "(" + _line(value) + ")"
        case _:
            return str(getattr(value, "name", value))

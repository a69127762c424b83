"""Writes effects of the lease and transfer books as text, one line each: a test can show a whole conversation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from baton.messages.ids import AttemptKey
from kv_transfer.effects import Recorded


def lines(effects: Iterable[Any]) -> list[str]:
    """One line per effect; records are left out, they have their own tests."""
    return [_line(effect) for effect in effects if not isinstance(effect, Recorded)]


def names(effects: Iterable[Any]) -> list[str]:
    """The names of the records among the effects."""
    return [effect.name for effect in effects if isinstance(effect, Recorded)]


def _line(value: Any) -> str:
    return " ".join([type(value).__name__, *(_word(getattr(value, field.name)) for field in fields(value))])


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

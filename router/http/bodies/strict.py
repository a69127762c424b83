"""The base of all bodies, and how a client's JSON becomes one: the first wrong field is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.errors import InvalidRequest

_MAX_NAME_CHARS = 80
"""Longer names of fields are cut in refusals, and not compared with known names, which would take seconds."""
M = TypeVar("M", bound="Strict")


class Strict(BaseModel):
    """A model that takes its own fields alone, each of its own type; the base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


def read_as(kind: type[M], found: Mapping[str, Any]) -> M:
    """A client's JSON as this model; raises InvalidRequest that names the first wrong field."""
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise _refusal(kind, error) from None


def _refusal(kind: type[Strict], error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    place = first["loc"]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    match first["type"]:
        case "extra_forbidden":
            is_name = len(place) == 1 and len(str(place[0])) <= _MAX_NAME_CHARS
            close = get_close_matches(str(place[0]), kind.model_fields, n=1) if is_name else ()
            return InvalidRequest(_shown(field), "is unknown" + (f" (did you mean {close[0]}?)" if close else ""))
        case "missing":
            return InvalidRequest(field, "is required")
        case "value_error":
            return InvalidRequest(field, str(first["ctx"]["error"]))
        case _:
            return InvalidRequest(field, first["msg"].replace("Input should be", "must be"))


def _shown(field: str) -> str:
    return field if len(field) <= _MAX_NAME_CHARS else field[:_MAX_NAME_CHARS] + "..."

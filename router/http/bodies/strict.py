"""The base of all bodies, and how a client's JSON becomes one: the first wrong field is refused by its name."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

from baton.errors import InvalidRequest
from router.http.bodies.ignored import note_ignored

_MAX_NAME_CHARS = 80
"""Longer names of fields are cut in refusals, and not compared with known names, which would take seconds."""
M = TypeVar("M", bound="Strict")
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values with which a field asks for nothing."""


class Treatment(enum.Enum):
    """Marks a field of a body that is not simply served. The table in docs/http.md is rendered from these marks."""

    IGNORED = "ignored"
    """The field can't change what the answer means; the header of the answer names it."""
    ONE_VALUE = "has one value"
    """Only what is done anyway can be asked for."""
    REFUSED = "refused"
    """The answer would be another one than the client relies on."""


class _UnknownField(ValueError):
    """A field that a model does not have."""

    def __init__(self, name: str, known: frozenset[str]) -> None:
        super().__init__("is unknown")
        self.name = name
        self.known = known


class Strict(BaseModel):
    """A model that takes its own fields alone, each of its own type; the base of all bodies.

    Its lists are `Bounded`. With an error for each of 260,000 fields or entries a refusal would take a second.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
    _names: ClassVar[frozenset[str]] = frozenset()
    """The names of all fields, as clients write them."""
    _ignored: ClassVar[frozenset[str]] = frozenset()
    """The fields that have no effect."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        cls._names = frozenset(fields)
        cls._ignored = frozenset(name for name, field in fields.items() if Treatment.IGNORED in field.metadata)

    @model_validator(mode="before")
    @classmethod
    def _has_no_unknown_fields(cls, found: Any) -> Any:
        if isinstance(found, dict) and not found.keys() <= cls._names:
            raise _UnknownField(next(name for name in found if name not in cls._names), cls._names)
        if isinstance(found, dict) and not cls._ignored.isdisjoint(found):
            note_ignored(name for name in cls._ignored & found.keys() if found[name] not in _NOTHING)
        return found


@dataclass(frozen=True, slots=True)
class Bounded:
    """Marks a list of which only the first wrong entry is looked for, and only where there are not too many of them."""

    most: int
    what: str = "entries"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        if schema["type"] != "list":
            raise TypeError(f"{source} is no list")
        return no_info_before_validator_function(self._check, {**schema, "fail_fast": True, "max_length": self.most})

    def _check(self, value: Any) -> Any:
        if isinstance(value, list) and len(value) > self.most:
            raise ValueError(f"has {len(value)} {self.what}; at most {self.most} are taken")
        return value


def read_as(kind: type[M], found: Mapping[str, Any]) -> M:
    """A client's JSON as this model; raises InvalidRequest that names the first wrong field."""
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise _refusal(error) from None


def read_part(kind: type[M], found: Mapping[str, Any], name: str = "") -> M:
    """A part of a body as this model, for a validator of the body; raises ValueError that names the first wrong field.

    `name`: what the part is called in the refusal; empty: the body's field is the part.
    """
    try:
        return read_as(kind, found)
    except InvalidRequest as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from None


def _refusal(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    place = first["loc"]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    match first["type"]:
        case "missing":
            return InvalidRequest(field, "is required")
        case "value_error":
            cause = first["ctx"]["error"]
            return _unknown(field, cause) if isinstance(cause, _UnknownField) else InvalidRequest(field, str(cause))
        case _:
            return InvalidRequest(field, first["msg"].replace("Input should be", "must be"))


def _unknown(place: str, cause: _UnknownField) -> InvalidRequest:
    """The refusal of an unknown field of the object at a place; empty: of the whole body."""
    close = get_close_matches(cause.name, cause.known, n=1) if len(cause.name) <= _MAX_NAME_CHARS else ()
    # Pydantic takes no error whose text is not valid Unicode.
    name = cause.name.encode(errors="backslashreplace").decode()
    field = f"{place}.{name}" if place else name
    return InvalidRequest(_shown(field), "is unknown" + (f" (did you mean {close[0]}?)" if close else ""))


def _shown(field: str) -> str:
    return field if len(field) <= _MAX_NAME_CHARS else field[:_MAX_NAME_CHARS] + "..."

"""What all bodies share: their base, the types of their fields, and how a client's JSON becomes a body.

The first wrong field is refused by its name. Fields without effect are named in a header of the answer.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

from baton.errors import InvalidRequest
from baton.messages.request_limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_IDS,
)

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
    core_names: ClassVar[Mapping[str, Sequence[str]]] = {}
    """For fields that the core knows by other names than this body: the body's names, for refusals.

    A refusal names the first one of them that the client sent, or else the last one. If the body has no field with the
    core's name, but a client may have sent one, that name is in the list, too, and comes first. Headers are among them.
    """
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

    @classmethod
    def own_name(cls, field: str, sent: Collection[str]) -> str:
        """The name that a field of the core has in a body of which these fields were sent."""
        names = cls.core_names.get(field, (field,))
        return next((name for name in names if name in sent), names[-1])

    @model_validator(mode="before")
    @classmethod
    def _has_no_unknown_fields(cls, body: Any) -> Any:
        if isinstance(body, dict) and not body.keys() <= cls._names:
            raise _UnknownField(next(name for name in body if name not in cls._names), cls._names)
        if isinstance(body, dict) and not cls._ignored.isdisjoint(body):
            note_ignored(name for name in cls._ignored & body.keys() if body[name] not in _NOTHING)
        return body


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


def read_as(kind: type[M], body: Mapping[str, Any]) -> M:
    """A client's JSON as this model; raises InvalidRequest that names the first wrong field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None


def read_part(kind: type[M], body: Mapping[str, Any], name: str = "") -> M:
    """A part of a body as this model, for a validator of the body; raises ValueError that names the first wrong field.

    `name`: what the part is called in the refusal; empty: the body's field is the part.
    """
    try:
        return read_as(kind, body)
    except InvalidRequest as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from None


def _refusal(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    location = first["loc"]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    match first["type"]:
        case "missing":
            return InvalidRequest(field, "is required")
        case "value_error":
            cause = first["ctx"]["error"]
            return _unknown(field, cause) if isinstance(cause, _UnknownField) else InvalidRequest(field, str(cause))
        case _:
            return InvalidRequest(field, first["msg"].replace("Input should be", "must be"))


def _unknown(path: str, cause: _UnknownField) -> InvalidRequest:
    """The refusal of an unknown field of the object at a place; empty: of the whole body."""
    close = get_close_matches(cause.name, cause.known, n=1) if len(cause.name) <= _MAX_NAME_CHARS else ()
    # Pydantic takes no error whose text is not valid Unicode.
    name = cause.name.encode(errors="backslashreplace").decode()
    field = f"{path}.{name}" if path else name
    return InvalidRequest(_shown(field), "is unknown" + (f" (did you mean {close[0]}?)" if close else ""))


def _shown(field: str) -> str:
    return field if len(field) <= _MAX_NAME_CHARS else field[:_MAX_NAME_CHARS] + "..."


def is_ids(value: Any) -> bool:
    """Whether this is a list of token ids; raises ValueError for more than any request may have."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        return False
    if len(value) > MAX_TOKEN_IDS:
        raise ValueError(f"has {len(value)} token ids; at most {MAX_TOKEN_IDS} are taken")
    return True


def _token_ids(value: Any) -> Sequence[int]:
    if not is_ids(value):
        raise ValueError("must be a list of token ids")
    return list(value)


def _stop_token_ids(value: Any) -> Sequence[int]:
    if value is None:
        return ()
    if isinstance(value, list) and len(value) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_STOP_TOKEN_IDS} are taken")
    return _token_ids(value)


def _allowed_token_ids(value: Any) -> Sequence[int]:
    if value is None:
        return ()
    if value == []:
        raise ValueError("is empty: no token would be allowed")
    if isinstance(value, list) and len(value) > MAX_ALLOWED_TOKEN_IDS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_ALLOWED_TOKEN_IDS} are taken")
    return _token_ids(value)


def texts(value: Any, most: int, what: str = "texts", must: str = "must be a list of strings") -> Sequence[str]:
    """A list of at most so many texts; raises ValueError."""
    if isinstance(value, list) and len(value) > most:
        raise ValueError(f"has {len(value)} {what}; at most {most} are taken")
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(must)
    return tuple(value)


def _bad_words(value: Any) -> Sequence[str]:
    return () if value is None else texts(value, MAX_BAD_WORDS)


def _stop(value: Any) -> Sequence[str]:
    if value is None:
        return ()
    must = "must be a string or a list of strings"
    return (value,) if isinstance(value, str) else texts(value, MAX_STOP_STRINGS, "strings", must)


def _logit_bias(value: Any) -> Mapping[int, float]:
    if value is None:
        return {}
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_LOGIT_BIAS} are taken")
    if not isinstance(value, dict) or not all(type(bias) in (int, float) for bias in value.values()):
        raise ValueError("must be an object from token ids to numbers")
    bad = next((key for key in value if not (key.isascii() and key.isdigit() and len(key) < 16)), None)
    if bad is not None:
        raise ValueError(f"has the key {bad[:32]!r}, which is no token id")
    try:
        return {int(key): float(bias) for key, bias in value.items()}
    except OverflowError:
        raise ValueError("has a bias that is too large") from None


def _truncation(value: Any) -> int | None:
    if value is None or (type(value) is int and (value == -1 or 1 <= value <= MAX_TOKEN_IDS)):
        return value
    raise ValueError(f"must be 1 to {MAX_TOKEN_IDS}, or -1 for as many tokens as the model takes")


def _not_served(value: Any) -> None:
    if value not in (None, "", [], {}):
        raise ValueError("is not served here")


Texts = str | list[str]
TextsOrIds = str | list[int] | list[str] | list[list[int]]
"""What a field may be, in the description of the API, that takes a text, token ids, or a list of either."""
TokenIds = Annotated[Sequence[int], PlainValidator(_token_ids, json_schema_input_type=list[int])]
Stop = Annotated[Sequence[str], PlainValidator(_stop, json_schema_input_type=str | list[str])]
StopTokenIds = Annotated[Sequence[int], PlainValidator(_stop_token_ids, json_schema_input_type=list[int])]
AllowedTokenIds = Annotated[Sequence[int], PlainValidator(_allowed_token_ids, json_schema_input_type=list[int])]
BadWords = Annotated[Sequence[str], PlainValidator(_bad_words, json_schema_input_type=list[str])]
LogitBias = Annotated[Mapping[int, float], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float])]
NotServed = Annotated[None, PlainValidator(_not_served, json_schema_input_type=None), Treatment.REFUSED]
_NO_EFFECT = WithJsonSchema({"description": "Accepted; changes no answer."})
Ignored = Annotated[Any, _NO_EFFECT, Treatment.IGNORED]
"""A field that may have any value, and has no effect."""
RepeatedText = Annotated[str | None, _NO_EFFECT, Treatment.IGNORED]
"""A field that has no effect, but that the answer repeats."""
OnlyFalse = Annotated[Literal[False] | None, Treatment.ONE_VALUE]
OnlyTrue = Annotated[Literal[True] | None, Treatment.ONE_VALUE]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Truncation = Annotated[int | None, PlainValidator(_truncation, json_schema_input_type=int)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

"""What the text of an answer must be: OpenAI's response format, and vLLM's structured outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.request_limits import MAX_CHOICES
from baton.text.constraints.structural_tags import lark_of_structural_tag
from router.http.bodies.fields import Ignored, NotServed, OnlyFalse
from router.http.bodies.strict import Bounded, Strict

ANY_OBJECT = '{"type": "object"}'
"""The schema of the response format json_object."""
_MAX_STRUCTURES = 4096
"""More structures, or triggers of them, are longer than a structural tag may be."""
Constrained = tuple[str, "str | Sequence[str] | None"]
"""A field of the core that says what an answer must be, and its value."""


def _object_text(value: Any, kind: str) -> str | None:
    """An object of JSON as text, which is checked later; `kind`: what it is, for the error."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"must be a {kind}: an object, or its text")
    return json.dumps(value)


def _pattern(value: Any) -> str | None:
    """A regular expression or a grammar, which is checked later."""
    if value is None or (isinstance(value, str) and value):
        return value
    raise ValueError("must be a text that is not empty")


def _choice(value: Any) -> Sequence[str]:
    if value is None:
        return ()
    if isinstance(value, list) and len(value) > MAX_CHOICES:
        raise ValueError(f"has {len(value)} texts; at most {MAX_CHOICES} are taken")
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise ValueError("must be a list of texts, none of them empty")
    return tuple(value)


Schema = Annotated[
    str | None,
    PlainValidator(partial(_object_text, kind="JSON schema"), json_schema_input_type=dict[str, Any] | str),
]
Pattern = Annotated[str | None, PlainValidator(_pattern, json_schema_input_type=str)]
StructuralTag = Annotated[
    str | None,
    PlainValidator(partial(_object_text, kind="structural tag"), json_schema_input_type=dict[str, Any] | str),
]
Choice = Annotated[Sequence[str], PlainValidator(_choice, json_schema_input_type=list[str])]


class JsonSchema(Strict):
    """A schema in OpenAI's wrapping. Every answer conforms to it, whether `strict` is set or not."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Strict):
    """The format that the text of an answer must have."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: Annotated[list[Any], Bounded(_MAX_STRUCTURES)] | None = None
    triggers: Annotated[list[Any], Bounded(_MAX_STRUCTURES)] | None = None

    def as_constraint(self) -> Constrained:
        """What the text must be, with None for any text; raises InvalidRequest if type and other fields do not fit."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest("response_format.json_schema", "and the type json_schema need each other")
        tag = self.model_dump(include={"format", "structures", "triggers"}, exclude_none=True)
        if self.type == "structural_tag":
            return "grammar", lark_of_structural_tag(json.dumps({"type": self.type, **tag}), "response_format")
        if tag:
            raise InvalidRequest(f"response_format.{next(iter(tag))}", "needs the type structural_tag")
        if self.json_schema is None:
            return "json_schema", ANY_OBJECT if self.type == "json_object" else None
        return "json_schema", json.dumps(self.json_schema.schema_)


class StructuredOutputs(Strict):
    """What the text of an answer must be, in vLLM's words."""

    json_: Schema = Field(None, alias="json")
    json_object: bool | None = None
    disable_any_whitespace: OnlyFalse = None
    disable_additional_properties: OnlyFalse = None
    disable_fallback: Ignored = None
    regex: Pattern = None
    choice: Choice = ()
    grammar: Pattern = None
    structural_tag: StructuralTag = None
    whitespace_pattern: NotServed = None

    def as_constraint(self) -> Constrained:
        """The one that is given; raises InvalidRequest unless there is exactly one."""
        given: list[Constrained] = [
            (kind, value) for kind in ("regex", "choice", "grammar") if (value := getattr(self, kind))
        ]
        given += [("json_schema", self.json_)] if self.json_ is not None else []
        given += [("json_schema", ANY_OBJECT)] if self.json_object else []
        given += [("grammar", self.structural_tag)] if self.structural_tag is not None else []
        if len(given) != 1:
            message = "must have exactly one of json, json_object: true, regex, choice, grammar and structural_tag"
            raise InvalidRequest("structured_outputs", message)
        if self.structural_tag is not None:
            return "grammar", lark_of_structural_tag(self.structural_tag, "structured_outputs.structural_tag")
        return given[0]

"""Formats that only describe a value, and what is left of a schema without them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.text.constraints.json_schemas import CHECKED_FORMATS, without_descriptions
from baton.text.constraints.schema_compiling import check_constraint
from baton.text.constraints.structural_tags import lark_of_structural_tag
from baton.text.tool_calls.formats import FORMATS, CallGrammarOptions, Tool

ONLY_DESCRIBED = ["path", "password", "binary", "json-pointer", "regex", "int32", ""]
PLACES: dict[str, Any] = {
    "alone": lambda one: one,
    "property": lambda one: {"type": "object", "properties": {"format": one}, "patternProperties": {"^x": one}},
    "item": lambda one: {"type": "array", "prefixItems": [one], "items": one, "minItems": 1},
    "any of": lambda one: {"anyOf": [{"type": "integer"}, {"allOf": [one]}]},
    "definition": lambda one: {"$ref": "#/$defs/format", "$defs": {"format": one}},
    "further key": lambda one: {"type": "object", "additionalProperties": one},
}


@pytest.mark.parametrize("place", PLACES)
def test_what_only_describes_restricts_nothing(place: str) -> None:
    for name in ONLY_DESCRIBED:
        schema = PLACES[place]({"type": "string", "format": name, "maxLength": 3})
        assert without_descriptions(schema) == PLACES[place]({"type": "string", "maxLength": 3})
        check_constraint(json.dumps(schema))
    unique = PLACES[place]({"type": "array", "uniqueItems": False})
    assert without_descriptions(unique) == PLACES[place]({"type": "array"})
    check_constraint(json.dumps(unique))


def test_formats_that_are_checked_stay() -> None:
    for name in CHECKED_FORMATS - {"unknown"}:
        check_constraint(json.dumps({"type": "string", "format": name, "pattern": "^.{1,50}$"}))
        with pytest.raises(InvalidRequest):
            check_constraint(json.dumps({"type": "string", "format": name, "const": "\x07"}))


def test_values_that_look_like_keywords_stay() -> None:
    value = {"format": "path", "uniqueItems": False, "items": {"format": "path"}}
    schema = {
        "const": value,
        "enum": [value],
        "default": value,
        "x-guidance": value,
        "properties": {"uniqueItems": False},
    }
    assert without_descriptions(schema) == schema


def test_schemas_within_grammars_may_describe_too() -> None:
    schema = {"type": "object", "properties": {"file": {"type": "string", "format": "path"}}}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    check_constraint(lark_of_structural_tag(json.dumps(tag), "response_format"), "grammar")
    options = CallGrammarOptions(is_parallel=True, closes_objects=True, reasons=False, is_open=False)
    tools = [Tool.of("open", schema, is_strict=True)]
    check_constraint(FORMATS["hermes"].demand(tools, options).grammar, "grammar")
    check_constraint(FORMATS["hermes"].strict_calls(tools, options), "grammar")

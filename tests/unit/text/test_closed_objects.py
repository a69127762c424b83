"""Objects of JSON schemas have the listed keys alone, wherever that leaves something that satisfies the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.text.constraints.json_schemas import without_extra_keys
from baton.text.constraints.schema_compiling import check_constraint
from tests.support.json_fit import SCHEMAS

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}}
CLOSED = {**A, "additionalProperties": False}


def closed(schema: Any) -> Any:
    return json.loads(without_extra_keys(json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED}),
        ({"properties": {"x": A}}, {"properties": {"x": CLOSED}, "additionalProperties": False}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [A]}, {"allOf": [CLOSED]}),
        (
            {"$defs": {"A": A}, "type": "array", "items": {"$ref": "#/$defs/A"}},
            {"$defs": {"A": CLOSED}, "type": "array", "items": {"$ref": "#/$defs/A"}},
        ),
        ({**A, "additionalProperties": {"type": "object", **B}}, None),
    ],
)
def test_an_object_that_lists_its_keys_has_no_others(schema: Any, expected: Any) -> None:
    if expected is None:
        expected = {**schema, "additionalProperties": {"type": "object", **B, "additionalProperties": False}}
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "patternProperties": {"^x": {"type": "string"}}},
        {**A, "unevaluatedProperties": {"type": "string"}},
        {**A, "minProperties": 2},
        {**A, "required": ["b"]},
        {**A, "dependentRequired": {"a": ["b"]}},
        {"allOf": [A, B]},
        {**A, "allOf": [B]},
        {**A, "anyOf": [B, {"required": ["a"]}]},
        {"allOf": [A], "anyOf": [B]},
        {"$defs": {"A": A}, "$ref": "#/$defs/A", **B},
        {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]},
        {"allOf": [{"properties": {"x": A}}, {"properties": {"x": B}}]},
        {"not": A},
        {"if": A, "then": B},
        {**A, "dependentSchemas": {"a": B}},
        {"const": {"properties": {"a": 1}}},
        {"enum": [A]},
    ],
)
def test_a_schema_that_says_more_about_its_keys_is_left_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema


def test_a_definition_stays_open_if_another_schema_stands_beside_one_of_its_references() -> None:
    schema = {
        "$defs": {"A": A},
        "properties": {"x": {"$ref": "#/$defs/A"}, "y": {"allOf": [{"$ref": "#/$defs/A"}, B]}},
    }
    assert closed(schema) == {**schema, "additionalProperties": False}


def test_references_in_a_circle_and_into_nothing_end() -> None:
    schema = {
        "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}, "loop": {"$ref": "#/$defs/loop"}},
        "anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/loop"}, {"$ref": "#/no/0/such"}, {"$ref": "other.json"}],
    }
    assert closed(schema)["$defs"]["node"]["additionalProperties"] is False


@pytest.mark.parametrize("name", SCHEMAS)
def test_closed_schemas_are_closed_already(name: str) -> None:
    assert closed(SCHEMAS[name]) == SCHEMAS[name]


def test_what_is_closed_can_be_compiled_and_keeps_the_order_of_its_keys() -> None:
    text = without_extra_keys(json.dumps({"properties": {"z": A, "a": {"type": "string", "const": "é"}}}))
    assert text.index('"z"') < text.index('"a":{"type":"string"')
    check_constraint(text)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', '{"properties": {"a": {"items": NaN}}}'])
def test_text_that_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        without_extra_keys(text)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 3},
        {"allOf": 3, "anyOf": {"a": 1}, "$ref": 7},
        {"dependentSchemas": 4, "prefixItems": {"a": 3}},
        {"properties": {"a": True, "b": None}, "required": 5},
        {"properties": {"a": True}, "required": [{}]},
        {"$ref": "#/allOf/x", "allOf": [A]},
    ],
)
def test_keywords_of_wrong_types_are_left_to_the_compiler(schema: Any) -> None:
    closed(schema)

"""JSON schemas for tests, and a validator that shares no code with the library that constrains the output."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", "青", "null"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "object": PERSON,
    "optional": {**PERSON, "required": ["age"]},
    "enum": {"enum": ["yes", "no", 3, None, "naïve \U0001f600"]},
    "integer": {"type": "integer", "minimum": -3, "exclusiveMaximum": 1000},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{1,4}(é|ß)$"},
    "nested": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "boolean"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "type": "array",
        "items": {"$ref": "#/$defs/node"},
        "minItems": 1,
        "maxItems": 2,
    },
    "constant": {"const": {"a": [1, '\u00fc"\\\n', None]}},
}
"""All schemas are bounded, so that even a model that samples at random ends its output."""


def schema_text(name: str) -> str:
    return json.dumps(SCHEMAS[name])


def check_fits(text: str, name: str) -> None:
    """Raises AssertionError unless `text` is JSON that fits the schema of this name."""
    schema = SCHEMAS[name]
    why = _misfit(json.loads(text), schema, schema)
    assert why is None, f"{text!r} does not fit {name}: {why}"


def _misfit(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str | None:
    """Return what is wrong, by the keywords that are used above; None if the value fits."""
    if "$ref" in schema:
        return _misfit(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema and all(_misfit(value, option, root) for option in schema["anyOf"]):
        return f"{value!r} is none of {schema['anyOf']}"
    if "enum" in schema and not any(_same(value, option) for option in schema["enum"]):
        return f"{value!r} is none of {schema['enum']}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{value!r} is not {schema['const']!r}"
    match schema.get("type"):
        case "object":
            return _object_misfit(value, schema, root)
        case "array":
            if not isinstance(value, list) or not schema.get("minItems", 0) <= len(value) <= schema["maxItems"]:
                return f"{value!r} is no such array"
            return next((why for item in value if (why := _misfit(item, schema["items"], root))), None)
        case "string":
            return _string_misfit(value, schema)
        case "integer" | "number" as kind:
            return _number_misfit(value, schema, int if kind == "integer" else int | float)
        case "boolean" if not isinstance(value, bool):
            return f"{value!r} is no boolean"
        case "null" if value is not None:
            return f"{value!r} is not null"
    return None


def _object_misfit(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str | None:
    if not isinstance(value, dict) or not set(schema["required"]) <= set(value) <= set(schema["properties"]):
        return f"{value!r} is no such object"
    found = (_misfit(item, schema["properties"][key], root) for key, item in value.items())
    return next((why for why in found if why), None)


def _string_misfit(value: Any, schema: Mapping[str, Any]) -> str | None:
    if not isinstance(value, str) or not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99):
        return f"{value!r} is no such string"
    if "pattern" in schema and not re.search(schema["pattern"], value, re.ASCII):
        return f"{value!r} does not match {schema['pattern']}"
    return None


def _number_misfit(value: Any, schema: Mapping[str, Any], kind: Any) -> str | None:
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or value < schema["minimum"] or value > schema.get("maximum", value):
        return f"{value!r} is no such number"
    return f"{value} is too large" if value >= schema.get("exclusiveMaximum", value + 1) else None


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right

"""Leaves out of a JSON schema what describes a value and restricts nothing: formats that are not checked here.

In JSON Schema `format` is an annotation (2020-12, section 7.2.1), and any text may be one: pydantic writes `path`,
`password` and `binary`. `uniqueItems: false` is what holds without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

CHECKED_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""The formats that llguidance has the output keep to."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values have a schema under each name."""
_OF_SCHEMAS = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "items", "prefixItems", "additionalItems"),
    *("unevaluatedItems", "contains", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
)
"""Keywords whose values are a schema or a list of schemas."""


def without_descriptions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without them, at any depth; the argument is not changed."""
    found = dict(schema)
    for key in _BY_NAME:
        if isinstance(named := found.get(key), dict):
            found[key] = {name: _cleaned(one) for name, one in named.items()}
    for key in _OF_SCHEMAS:
        if isinstance(below := found.get(key), dict | list):
            found[key] = [_cleaned(one) for one in below] if isinstance(below, list) else _cleaned(below)
    for key in tuple(_describing(found)):
        del found[key]
    return found


def _cleaned(schema: Any) -> Any:
    return without_descriptions(schema) if isinstance(schema, dict) else schema


def _describing(schema: Mapping[str, Any]) -> Iterator[str]:
    name = schema.get("format")
    if isinstance(name, str) and name not in CHECKED_FORMATS:
        yield "format"
    if schema.get("uniqueItems") is False:
        yield "uniqueItems"

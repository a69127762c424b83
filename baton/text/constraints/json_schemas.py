"""JSON schemas before they are compiled: read within bounds, without what restricts nothing, and with closed objects.

In JSON Schema `format` is an annotation (2020-12, section 7.2.1), and any text may be one: pydantic writes `path`,
`password` and `binary`. Formats that are not checked here are left out, and so is `uniqueItems: false`, which holds
without it.

JSON Schema permits any further key unless `additionalProperties` forbids it, and a model that may go on adding keys
often does, until its output is cut off. So, as in OpenAI's structured outputs, an object has the listed keys alone,
unless its schema has `additionalProperties`, `patternProperties` or `unevaluatedProperties`. It is left as it is where
another schema applies to the same value (under `allOf`, beside `$ref` or `anyOf`, under `if`, `not` or
`dependentSchemas`; JSON Schema 2020-12, sections 10.2 and 11): each would forbid the other's keys, and nothing would
satisfy both. The same holds where a key is required that is not listed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from baton.errors import InvalidRequest

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32
"""The deepest nesting of arrays and objects in a schema."""
FIELD = "json_schema"
_MAX_DIGITS = 400
_MAX_ERROR_CHARS = 200
_NO_EXTENSION = "NoExtensionBias"
"""Part of llguidance's message for an output that can neither go on nor end."""
NOTHING_FITS = "no text that the model can write fits"
_ONE_OF = "coerce_one_of"
"""Part of llguidance's message, an option of the library, for schemas that a value might fit together."""
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


def shortened(error: object) -> str:
    """The library's error message in one line of at most _MAX_ERROR_CHARS characters."""
    text = str(error)
    if _NO_EXTENSION in text:
        return NOTHING_FITS
    if _ONE_OF in text:
        return "has oneOf of which a value may fit several; use anyOf"
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_ERROR_CHARS else f"{line[: _MAX_ERROR_CHARS - 3]}..."


def parse_schema(text: str, field: str = FIELD) -> dict[str, Any]:
    """The schema as a dictionary; raises InvalidRequest for text that is no JSON object, too large or too deep.

    `field`: what errors name.
    """
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(field, "is not valid UTF-8") from None
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequest(field, f"has {num_bytes} bytes; at most {MAX_SCHEMA_BYTES} are taken")
    too_deep = InvalidRequest(field, f"is deeper than {MAX_SCHEMA_DEPTH} levels")
    try:
        schema = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        raise InvalidRequest(field, f"is not JSON: {shortened(error)}") from None
    if not isinstance(schema, dict):
        raise InvalidRequest(field, "must be a JSON object")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise too_deep
    return schema


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {twice[:80]!r} is there twice")
    return unique


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _bounded(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large")
    return number


def _depth(value: Any) -> int:
    deepest, pending = 0, [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if not isinstance(item, dict | list):
            continue
        deepest = max(deepest, depth)
        pending.extend((child, depth + 1) for child in (item.values() if isinstance(item, dict) else item))
    return deepest


def without_descriptions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without them, at any depth; the argument is not changed."""
    cleaned = dict(schema)
    for key in _BY_NAME:
        if isinstance(named := cleaned.get(key), dict):
            cleaned[key] = {name: _cleaned(child) for name, child in named.items()}
    for key in _OF_SCHEMAS:
        if isinstance(below := cleaned.get(key), dict | list):
            cleaned[key] = [_cleaned(child) for child in below] if isinstance(below, list) else _cleaned(below)
    for key in tuple(_describing(cleaned)):
        del cleaned[key]
    return cleaned


def _cleaned(schema: Any) -> Any:
    return without_descriptions(schema) if isinstance(schema, dict) else schema


def _describing(schema: Mapping[str, Any]) -> Iterator[str]:
    name = schema.get("format")
    if isinstance(name, str) and name not in CHECKED_FORMATS:
        yield "format"
    if schema.get("uniqueItems") is False:
        yield "uniqueItems"


_SAYS_SOMETHING = ("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")
"""Keywords whose schemas apply to the same value as their parent, and may take its place if it has nothing else."""
_ALWAYS_BESIDE = ("if", "then", "else", "not", "dependentSchemas", "$dynamicRef", "dependentRequired")
"""Keywords whose schemas only add to others."""
_OF_OBJECTS = ("properties", "required", *_SAYS_SOMETHING, "maxProperties", "propertyNames")
_NAMED_CHILDREN = ("properties", "patternProperties")
_CHILDREN = ("additionalProperties", "unevaluatedProperties", "items", "prefixItems", "unevaluatedItems", "contains")

Node = dict[str, Any]


@lru_cache(maxsize=64)
def without_extra_keys(text: str) -> str:
    """The schema in which objects have the listed keys alone; raises InvalidRequest for text that is no schema."""
    schema = parse_schema(text)
    open_nodes: set[int] = set()
    visited: dict[tuple[int, bool], Node] = {}
    pending: list[tuple[Any, bool]] = [(schema, False)]
    while pending:
        node, is_open = pending.pop()
        if not isinstance(node, dict) or (id(node), is_open) in visited:
            continue
        visited[id(node), is_open] = node
        if is_open:
            open_nodes.add(id(node))
        pending.extend(_below(node, schema, is_open))
    for (identity, _), node in visited.items():
        if identity not in open_nodes and _may_be_closed(node):
            node["additionalProperties"] = False
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _below(node: Node, root: Node, is_open: bool) -> Iterator[tuple[Any, bool]]:
    """The schemas below a node, each with whether its objects stay open."""
    beside = [name for name in _IN_PLACE if name in node]
    is_shared = len(beside) > 1 or any(name in node for name in (*_OF_OBJECTS, *_ALWAYS_BESIDE))
    for name in beside:
        members = [_target(node[name], root)] if name == "$ref" else node[name]
        if isinstance(members, list):
            yield from ((member, is_open or is_shared or (name == "allOf" and len(members) > 1)) for member in members)
    for name in _ALWAYS_BESIDE:
        value = node.get(name)
        by_name = name == "dependentSchemas" and isinstance(value, dict)
        yield from ((child_schema, True) for child_schema in (dict(value or {}).values() if by_name else [value]))
    # What is below a value to which several schemas apply may have several, too.
    stays_open = is_open or bool(beside) or any(name in node for name in _ALWAYS_BESIDE)
    for name in _NAMED_CHILDREN:
        if isinstance(node.get(name), dict):
            yield from ((child, stays_open) for child in node[name].values())
    for name in _CHILDREN:
        child = node.get(name)
        yield from ((child_schema, stays_open) for child_schema in (child if isinstance(child, list) else [child]))


def _target(reference: Any, root: Node) -> Any:
    """What a reference within the schema points to (RFC 6901); None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node: Any = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(key)
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


def _may_be_closed(node: Node) -> bool:
    listed, required = node.get("properties"), node.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list):
        return False
    if any(name in node for name in (*_SAYS_SOMETHING, *_IN_PLACE, *_ALWAYS_BESIDE)):
        return False
    return all(isinstance(name, str) and name in listed for name in required)

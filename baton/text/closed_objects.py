"""Forbids the keys that a JSON schema does not list, where the schema says nothing about them.

JSON Schema permits any further key unless `additionalProperties` forbids it, and a model that may go on adding keys
often does, until its output is cut off. So, as in OpenAI's structured outputs, an object has the listed keys alone,
unless its schema has `additionalProperties`, `patternProperties` or `unevaluatedProperties`.

An object is left as it is where another schema applies to the same value (under `allOf`, beside `$ref` or `anyOf`,
under `if`, `not` or `dependentSchemas`; JSON Schema 2020-12, sections 10.2 and 11): each would forbid the other's keys,
and nothing would satisfy both. The same holds where a key is required that is not listed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from baton.text.schema_compiling import parse_schema

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
        found = node.get(name)
        by_name = name == "dependentSchemas" and isinstance(found, dict)
        yield from ((one, True) for one in (dict(found or {}).values() if by_name else [found]))
    # What is below a value to which several schemas apply may have several, too.
    stays_open = is_open or bool(beside) or any(name in node for name in _ALWAYS_BESIDE)
    for name in _NAMED_CHILDREN:
        if isinstance(node.get(name), dict):
            yield from ((child, stays_open) for child in node[name].values())
    for name in _CHILDREN:
        child = node.get(name)
        yield from ((one, stays_open) for one in (child if isinstance(child, list) else [child]))


def _target(reference: Any, root: Node) -> Any:
    """What a reference within the schema points to (RFC 6901); None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _may_be_closed(node: Node) -> bool:
    listed, required = node.get("properties"), node.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list):
        return False
    if any(name in node for name in (*_SAYS_SOMETHING, *_IN_PLACE, *_ALWAYS_BESIDE)):
        return False
    return all(isinstance(name, str) and name in listed for name in required)

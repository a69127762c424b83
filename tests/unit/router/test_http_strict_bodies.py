"""All bodies of the HTTP front: what is wrong with one is said once, however much of it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

import router.http.app  # noqa: F401  all bodies are defined then
from baton.errors import InvalidRequest
from router.http.bodies.fields import Strict, read_as
from router.http.messages.bodies import MessagesBody
from router.http.responses.bodies import ResponsesBody
from router.http.responses.items import ReasoningInput

MESSAGE = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
CALLER = "tools[0].allowed_callers[0]"


def models(base: type[Strict] = Strict) -> Iterator[type[Strict]]:
    for model in base.__subclasses__():
        yield model
        yield from models(model)


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects in a schema."""
    if isinstance(schema, dict):
        yield schema
    children = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for name, child in children:
        if name not in ("json_schema_input_schema", "serialization"):  # nothing is checked by these
            yield from nodes(child)


def in_core(model: type[Strict]) -> Iterator[dict[str, Any]]:
    return nodes(model.__pydantic_core_schema__)


@pytest.mark.parametrize("model", sorted(set(models()), key=str), ids=lambda model: model.__name__)
def test_every_list_is_bounded_and_ends_at_its_first_wrong_entry(model: type[Strict]) -> None:
    for node in in_core(model):
        kind = node.get("type")
        assert kind not in ("set", "frozenset", "tuple", "generator"), node
        if kind == "list":
            assert node.get("fail_fast"), node
            assert node.get("max_length"), node


def test_bodies_have_lists() -> None:
    lists = [node for model in models() for node in in_core(model) if node.get("type") == "list"]
    assert len(lists) >= 10


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (ReasoningInput, {"type": "reasoning", "summary": [1] * 9}, "summary[0]"),
        (ReasoningInput, {"type": "reasoning", "content": [1] * 4097}, "content"),
        (ResponsesBody, {"input": "x", "include": [1] * 9}, "include[0]"),
        (ResponsesBody, {"input": "x", "include": [1] * 33}, "include"),
        (ResponsesBody, {"input": "x", "reasoning": {"efort": "x", "y": 1}}, "reasoning.efort"),
        (ResponsesBody, {"input": [{"type": "reasoning", "\ud800": 1}]}, "input"),
        (ResponsesBody, {"\ud800": 1}, r"\ud800"),
        (ResponsesBody, {f"x{place}": 1 for place in range(9)}, "x0"),
        (MessagesBody, MESSAGE | {"tools": [{f"x{place}": 1 for place in range(9)}] * 2}, "tools[0].x0"),
        (MessagesBody, MESSAGE | {"tools": [{"name": "f", "input_schema": {}, "allowed_callers": [1] * 9}]}, CALLER),
    ],
)
def test_the_first_wrong_field_is_the_only_one_looked_at(kind: type[Strict], body: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() == 1
    with pytest.raises(InvalidRequest) as caught:
        read_as(kind, body)
    assert caught.value.field == field

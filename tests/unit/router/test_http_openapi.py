"""The description of the API has every path and field, and true examples; pages run their own scripts alone."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.routing import Route

from baton.messages.pooling import ModelPooling
from baton.messages.sampling import SamplingDefaults
from baton.text.chat_template import DEFAULT_TEMPLATE
from router.http.bodies.fields import read_as
from router.http.pages.field_meanings import FIELDS
from router.http.pages.html import LiveData, live_pages
from router.http.pages.openapi import description
from router.http.pages.operations import OPERATIONS, Operation
from tests.doubles.fake_clock import FakeClock
from tests.support.audio_files import encoded, tone
from tests.support.http_rig import CARD, HttpRig, chunk, finished
from tests.support.speech_rig import SpeechRig

API = description()
FORM = "multipart/form-data"
IGNORED = {"description": "Accepted; changes no answer."}


def served_routes() -> Iterator[Route]:
    rig = HttpRig()
    front = rig.front(rig.handler, 1000.0, DEFAULT_TEMPLATE)
    for route in [*front._routes.routes, *live_pages(LiveData(bytes, FakeClock(), 1.0))]:
        assert isinstance(route, Route)
        yield route


def test_every_served_path_is_described_and_no_other() -> None:
    served = {(method, route.path) for route in served_routes() for method in (route.methods or ()) if method != "HEAD"}
    described = {(operation.method, operation.path.replace("{name}", "{name:path}")) for operation in OPERATIONS}
    assert served == described
    assert set(API["paths"]) == {operation.path for operation in OPERATIONS}


def test_every_field_of_a_body_is_described_and_no_other() -> None:
    schemas = API["components"]["schemas"].items()
    named = {name: schema for name, schema in schemas if name not in ("Error", "AnthropicError")}
    fields = [item for schema in named.values() for item in schema["properties"].items()]
    assert {name for name, field in fields if field != IGNORED} == set(FIELDS)
    for schema in named.values():
        assert all(field["description"] for field in schema["properties"].values())


def test_fields_that_are_not_served_are_left_out_and_ranges_are_told() -> None:
    chat = API["components"]["schemas"]["ChatBody"]
    assert "functions" not in chat["properties"]
    assert chat["required"] == ["messages"]
    assert chat["properties"]["temperature"]["maximum"] == 2
    assert chat["properties"]["top_p"]["exclusiveMinimum"] == 0


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_the_range_of_a_body_goes_before_the_range_of_the_core() -> None:
    schemas = description()["components"]["schemas"]
    found = {name: schemas[name]["properties"]["temperature"] for name in ("MessagesBody", "ChatBody")}
    assert {name: (one["minimum"], one["maximum"]) for name, one in found.items()} == {
        "MessagesBody": (0, 1),
        "ChatBody": (0, 2),
    }


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_of_anthropics_api_are_described_as_they_are(path: str) -> None:
    document = description()
    responses = document["paths"][path]["post"]["responses"]
    assert "529" in responses
    assert "503" not in responses
    assert responses["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/AnthropicError")
    assert set(document["components"]["schemas"]["AnthropicError"]["properties"]) == {"type", "error", "request_id"}


def test_references_lead_somewhere_and_names_of_operations_differ() -> None:
    for reference in references(API):
        assert reference.removeprefix("#/components/schemas/") in API["components"]["schemas"]
    names = [operation["operationId"] for methods in API["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.bodies], ids=lambda one: one.path)
def test_an_example_of_a_request_is_a_request(operation: Operation) -> None:
    # A form's file is bytes, which JSON has not.
    file = {"file": b""} if operation.body_kind == FORM else {}
    read_as(operation.bodies[0], {**(operation.example or {}), **file})


def shape_of(value: Any) -> Any:
    """The names of fields, down to values and the first item of a list."""
    if isinstance(value, dict):
        return {name: shape_of(inner) for name, inner in value.items()}
    return [shape_of(value[0])] if isinstance(value, list) and value else None


POOLING = {operation.path for operation in OPERATIONS if operation.tag == "Embeddings"}
GENERATING = {operation.path for operation in OPERATIONS if operation.event} | POOLING


@pytest.mark.parametrize(
    "operation",
    [one for one in OPERATIONS if isinstance(one.answer, dict) and one.path not in ("/openapi.json", "/ui/data")],
    ids=lambda one: one.path,
)
async def test_an_example_of_an_answer_has_the_fields_of_an_answer(operation: Operation) -> None:
    own = SamplingDefaults(temperature=0.7, top_k=40)
    labels = ModelPooling(labels=("spam", "ham") if operation.path == "/classify" else ())
    rig = HttpRig(card=replace(CARD, name="demo_model", vocab_size=400, defaults=own, pooling=labels))
    if operation.body_kind == FORM:
        rig = SpeechRig()
        exchange = rig.send(encoded(tone(1)), operation.path, language="en")
        (await rig.next_call()).tell(finished("stop"))
    elif not operation.bodies:
        path = operation.path.replace("{name}", rig.card.name)
        if "{id}" in path:
            made = rig.post("/v1/responses", {"input": "a"})
            (await rig.next_call()).tell(chunk(0, "b"), finished("stop"))
            path = path.replace("{id}", (await made.end()).json["id"])
        exchange = rig.request(operation.method, path, b"", {})
    else:
        # One input is one call, and a pair of equal texts.
        example = dict(operation.example or {})
        single = {"input": "a", "text_1": "a", "text_2": "a", "query": "a", "documents": ["a"]}
        body = {
            name: single[name] if operation.path in POOLING and name in single else example[name] for name in example
        }
        exchange = rig.post(operation.path, body)
        if operation.path in GENERATING:
            end = replace(finished("stop"), embedding=b"\0" * 8)
            (await rig.next_call()).tell(*([] if operation.path in POOLING else [chunk(0, "b")]), end)
    await exchange.end()
    assert exchange.status == operation.status, exchange.body
    assert shape_of(exchange.json) == shape_of(operation.answer)


@pytest.mark.parametrize("path", ["/", "/docs", "/ui"])
async def test_a_page_may_run_its_own_script_and_load_nothing(path: str) -> None:
    route = next(route for route in served_routes() if route.path == path)
    answer = await route.endpoint(Request({"type": "http"}))
    policy = answer.headers["content-security-policy"]
    scripts = re.findall(rb"<script>(.*?)</script>", answer.body, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    assert "script-src " + " ".join(f"'sha256-{digest}'" for digest in digests) + ";" in policy
    # What the page has as files came with it.
    assert b'<link rel="stylesheet"' not in answer.body
    assert b"<script src" not in answer.body
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")
    assert not re.search(rb"[a-z]://", answer.body.replace(b"http://www.w3.org/2000/svg", b""))
    assert b"innerHTML" not in answer.body


async def test_the_description_is_served_as_json() -> None:
    exchange = await HttpRig().get("/openapi.json").end()
    assert exchange.headers["content-type"] == "application/json"
    assert exchange.json == API

"""The OpenAPI 3.1 description of the HTTP API, made from the models that check requests.

Only what they do not say is written here: what a path does, what a field means, and an example of both directions.
"""

from __future__ import annotations

import json
from typing import Any

import baton
from baton.errors import InvalidRequest
from baton.messages.sampling import NUMBER_RANGES
from baton.security.matrix import CallerRole, callers_of_page
from router.http.bodies.fields import Strict
from router.http.errors import error_object
from router.http.pages.field_meanings import FIELDS
from router.http.pages.operations import EXAMPLE_ID, OPERATIONS, Operation

_REF = "#/components/schemas/"


_ABOUT = """Baton serves a language model from a cluster whose nodes either compute prompts or generate from them.

Fields are OpenAI's, and vLLM's for what OpenAI lacks. A field that is null counts as not sent. An unknown field is
refused by its name, and so is one that is known but not served. A field that can't change what the answer means has no
effect, and the header x-baton-ignored-fields of the answer names it: nothing is ignored silently.

Before the first token an error is a status with an error object. Later it is the last event of the stream. The header
x-should-retry says whether trying again makes sense, and retry-after when."""
_REQUEST_HEADERS = {
    "x-request-id": "Name of the request: 1 to 64 letters, digits or _ . : -. Without one it gets a name.",
    "x-request-timeout-ms": "Deadline of the request, in milliseconds.",
}
_NAMES_IN_PATHS = ("name", "id")
_LAST_EVENT_ID = (
    "Continues a stream that was cut: the id of its last event. The request is sent again as it was, with its"
    " x-request-id."
)
_ERRORS = {
    "400": "A field is wrong; param names it",
    "401": "No key, or one that is not known",
    "404": "No such path, model or stream to continue",
    "413": "The body is too long",
    "429": "The tenant has as many requests running as it may have",
    "503": "No node can take the request now",
    "504": "The deadline has passed",
}


def description() -> dict[str, Any]:
    """The OpenAPI document, as an object of JSON."""
    schemas: dict[str, Any] = {
        "Error": _schema_of(_error("temperature: must be in [0, 2], not 9.0")),
        "AnthropicError": _schema_of(
            json.loads(error_object(InvalidRequest("temperature", "must be in [0, 1]"), EXAMPLE_ID))
        ),
    }
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": baton.__version__, "description": _ABOUT},
        "servers": [{"url": "."}],
        "tags": [{"name": name} for name in dict.fromkeys(operation.tag for operation in OPERATIONS)],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key, where the cluster has keys."}
            },
        },
    }


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": _name_of(operation),
        "responses": _responses(operation),
    }
    if operation.about:
        made["description"] = operation.about
    if CallerRole.ANYONE not in callers_of_page(operation.path):
        made["security"] = [{"key": []}, {}]
    parameters = [_header(name, about) for name, about in _REQUEST_HEADERS.items()] if operation.event else []
    if operation.event and "id" in operation.event:
        parameters.append(_header("last-event-id", _LAST_EVENT_ID))
    parameters += [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _NAMES_IN_PATHS
        if f"{{{name}}}" in operation.path
    ]
    if parameters:
        made["parameters"] = parameters
    if operation.bodies:
        bodies = [_body_schema(body, schemas) for body in operation.bodies]
        content = {"schema": bodies[0] if len(bodies) == 1 else {"oneOf": bodies}, "example": operation.example}
        made["requestBody"] = {"required": True, "content": {operation.body_kind: content}}
    return made


def _name_of(operation: Operation) -> str:
    words = [word for word in _without_names(operation.path).replace(".", "/").split("/") if word]
    return "_".join([operation.method.lower(), *words])


def _without_names(path: str) -> str:
    for name in _NAMES_IN_PATHS:
        path = path.replace(f"{{{name}}}", "one")
    return path


def _header(name: str, about: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": about, "schema": {"type": "string"}}


def _responses(operation: Operation) -> dict[str, Any]:
    answer = operation.answer
    kind = "application/json"
    if isinstance(answer, str):
        kind = (
            "text/html"
            if answer.startswith("<")
            else "text/event-stream"
            if answer.startswith("data")
            else "text/plain"
        )
    content: dict[str, Any] = {kind: {"schema": _schema_of(answer), "example": answer}}
    if operation.event is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "With stream: true. Each event has one object as its data."},
            "example": operation.event,
        }
    responses: dict[str, Any] = {str(operation.status): {"description": "The answer", "content": content}}
    is_anthropic = operation.path.startswith("/v1/messages")
    error = {"application/json": {"schema": {"$ref": f"{_REF}{'AnthropicError' if is_anthropic else 'Error'}"}}}
    for status, about in _ERRORS.items() if operation.bodies else ():
        shown = "529" if is_anthropic and status == "503" else status
        responses[shown] = {"description": about, "content": error}
    return responses


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": "temperature", "code": "x"}}


def _schema_of(example: Any) -> dict[str, Any]:
    """The schema that an example shows; a null may be anything."""
    match example:
        case None:
            return {}
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer"}
        case float():
            return {"type": "number"}
        case str():
            return {"type": "string"}
        case list():
            return {"type": "array", "items": _schema_of(example[0]) if example else {}}
    return {"type": "object", "properties": {name: _schema_of(value) for name, value in example.items()}}


def _body_schema(body: type[Strict], schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to the schema of a body, which is added to `schemas` with those that it refers to."""
    made = body.model_json_schema(ref_template=f"{_REF}{{model}}")
    for name, inner in {**made.pop("$defs", {}), body.__name__: made}.items():
        schemas[name] = _readable(inner)
    return {"$ref": f"{_REF}{body.__name__}"}


def _readable(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without fields that may only be null, and without null, which means that a field is not sent."""
    properties = {}
    for name, schema_of_field in schema.get("properties", {}).items():
        if schema_of_field.get("type") == "null":
            continue
        known = {key: value for key, value in schema_of_field.items() if key not in ("title", "default", "anyOf")}
        if "anyOf" in schema_of_field:
            kinds = [kind for kind in schema_of_field["anyOf"] if kind.get("type") != "null"]
            known |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        if name in NUMBER_RANGES and "maximum" not in known:
            allowed = NUMBER_RANGES[name]
            known |= {"exclusiveMinimum" if allowed.above_low else "minimum": allowed.low, "maximum": allowed.high}
        properties[name] = {"description": FIELDS.get(name, ""), **known}
    kept = {key: value for key, value in schema.items() if key not in ("title", "properties")}
    return {**kept, "properties": properties}

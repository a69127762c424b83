"""The OpenAPI 3.1 description of the HTTP API, made from the models that check requests.

Only what they do not say is written here: what a path does, what a field means, and an example of both directions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import baton
from baton.errors import InvalidRequest
from baton.messages.sampling import NUMBER_RANGES, SamplingDefaults
from baton.security.matrix import CallerRole, callers_of_page
from router.http.adapters import LoadAdapterBody, UnloadAdapterBody
from router.http.api_fields import FIELDS
from router.http.audio.bodies import SpeechBody
from router.http.bodies.chats import ChatBody
from router.http.bodies.completions import CompletionBody
from router.http.bodies.embeddings import EmbeddingBody
from router.http.bodies.scores import ClassifyBody, RerankBody, ScoreBody
from router.http.bodies.strict import Strict, read_as
from router.http.messages.bodies import CountBody, MessagesBody
from router.http.messages.errors import error_object
from router.http.responses.bodies import ResponsesBody
from router.http.tokens import DetokenizeBody, TokenizeChat, TokenizeText

_REF = "#/components/schemas/"
_MODEL = "demo_model"
_ID = "req-z14q8xw8esvjh356zwa8ebmfa9"
_USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 4,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}
_HEAD = {"created": 1795492691, "model": _MODEL, "system_fingerprint": "fp_610415b939d9"}
_ENDS = {"finish_reason": "length", "stop_reason": None}
_CARD = {
    "id": _MODEL,
    "object": "model",
    "created": 1795492691,
    "owned_by": "baton",
    "root": _MODEL,
    "parent": None,
    "max_model_len": 2048,
    "capabilities": ["generate", "embed"],
    "has_chat_template": False,
    "image_limits": None,
    "tool_call_parser": None,
    "default_sampling_params": {"temperature": 0.7, "top_k": 40},
}
_HELLO = [{"role": "user", "content": "Hello"}]
_RESPONSE = {
    "id": "resp_0c9b2c0c5b7f4d1e8a6f3e2d1c0b9a87",
    "object": "response",
    "created_at": 1795492691,
    "completed_at": 1795492692,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "model": _MODEL,
    "output": [
        {
            "id": "msg_0c9b2c0c5b7f4d1e8a6f3e2d1c0b9a87_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello, you.", "annotations": [], "logprobs": []}],
        }
    ],
    "usage": {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 14,
    },
    **read_as(ResponsesBody, {"input": "Hello"}).echoed(SamplingDefaults()),
    "store": True,
}
_STORED = "/v1/responses/{id}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One path with one method."""

    method: str
    path: str
    tag: str
    summary: str
    answer: Any
    """An example of the answer: an object of JSON, or a text. Its schema is derived from it."""
    bodies: Sequence[type[Strict]] = ()
    """The bodies that it takes, one of them at a time."""
    example: Mapping[str, Any] | None = None
    about: str = ""
    event: Mapping[str, Any] | None = None
    """An example of an event, if the answer may be a stream."""
    status: int = 200
    """The HTTP status of the answer."""
    body_kind: str = "application/json"
    """The content type of the body."""


_GENERATING, _EMBEDDING, _TOKENS, _HEALTH, _PAGES = "Text", "Embeddings", "Tokens", "Models and health", "Pages"
OPERATIONS: Sequence[Operation] = (
    Operation(
        *("POST", "/v1/chat/completions", _GENERATING, "Continues a chat, as in OpenAI's API"),
        {
            "id": f"chatcmpl-{_ID}",
            "object": "chat.completion",
            **_HEAD,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello, you.", "refusal": None},
                    "logprobs": None,
                    **_ENDS,
                }
            ],
            "usage": _USAGE,
        },
        (ChatBody,),
        {"messages": _HELLO, "max_tokens": 64, "stream": False},
        about="The model's own chat template makes a prompt of the messages.",
        event={
            "id": f"chatcmpl-{_ID}",
            "object": "chat.completion.chunk",
            **_HEAD,
            "choices": [{"index": 0, "delta": {"content": "Hello"}, "logprobs": None, "finish_reason": None}],
        },
    ),
    Operation(
        *("POST", "/v1/completions", _GENERATING, "Continues a text, or several, as in OpenAI's API"),
        {
            "id": f"cmpl-{_ID}",
            "object": "text_completion",
            **_HEAD,
            "choices": [{"index": 0, "text": "\n    return n", "logprobs": None, **_ENDS}],
            "usage": _USAGE,
        },
        (CompletionBody,),
        {"prompt": "def fibonacci(n):", "max_tokens": 16, "seed": 7},
        about="A stream takes one prompt.",
        event={
            "id": f"cmpl-{_ID}",
            "object": "text_completion",
            **_HEAD,
            "choices": [{"index": 0, "text": "\n   ", "logprobs": None, "finish_reason": None}],
        },
    ),
    Operation(
        *("POST", "/v1/messages", _GENERATING, "Continues a conversation, as in Anthropic's API"),
        {
            "id": f"msg_{_ID}",
            "type": "message",
            "role": "assistant",
            "model": _MODEL,
            "content": [{"type": "text", "text": "Hello, you."}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 10,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 4,
            },
        },
        (MessagesBody,),
        {"model": _MODEL, "max_tokens": 64, "messages": _HELLO},
        about="Errors and events are in Anthropic's format; docs/http.md has the differences.",
        event={"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
    ),
    Operation(
        *("POST", "/v1/messages/count_tokens", _TOKENS, "Counts the tokens of a conversation, as in Anthropic's API"),
        {"input_tokens": 10},
        (CountBody,),
        {"model": _MODEL, "messages": _HELLO},
    ),
    Operation(
        *("POST", "/v1/responses", _GENERATING, "Continues a conversation that the router keeps, as in OpenAI's API"),
        _RESPONSE,
        (ResponsesBody,),
        {"input": "Hello", "max_output_tokens": 64},
        about="A response is kept for a while, by this router alone; docs/http.md has the bounds.",
        event={
            "type": "response.output_text.delta",
            "sequence_number": 4,
            "item_id": "msg_0c9b2c0c5b7f4d1e8a6f3e2d1c0b9a87_1",
            "output_index": 0,
            "content_index": 0,
            "delta": "Hello",
            "logprobs": [],
        },
    ),
    Operation(
        *("POST", "/v1/responses/input_tokens", _TOKENS, "Counts the tokens of a response's input, as in OpenAI's API"),
        {"object": "response.input_tokens", "input_tokens": 10},
        (ResponsesBody,),
        {"input": "Hello"},
    ),
    Operation("GET", _STORED, _GENERATING, "Returns a stored response", _RESPONSE),
    Operation(
        *("DELETE", _STORED, _GENERATING, "Deletes a stored response"),
        {"id": _RESPONSE["id"], "object": "response", "deleted": True},
    ),
    Operation(
        *("GET", f"{_STORED}/input_items", _GENERATING, "Lists the conversation before a stored response, in pages"),
        {
            "object": "list",
            "data": [
                {
                    "id": "msg_0c9b2c0c5b7f4d1e8a6f3e2d1c0b9a87_0",
                    "type": "message",
                    "role": "user",
                    "status": "completed",
                    "content": [{"type": "input_text", "text": "Hello"}],
                }
            ],
            "first_id": "msg_0c9b2c0c5b7f4d1e8a6f3e2d1c0b9a87_0",
            "last_id": "msg_0c9b2c0c5b7f4d1e8a6f3e2d1c0b9a87_0",
            "has_more": False,
        },
    ),
    Operation(
        *("POST", f"{_STORED}/cancel", _GENERATING, "Is refused: only responses in the background could be cancelled"),
        {"error": {"message": "...", "type": "invalid_request_error", "param": None, "code": None}},
        status=400,
    ),
    *(
        Operation(
            *("POST", path, _GENERATING, summary),
            {"text": "Hello, you.", "usage": {"type": "duration", "seconds": 2}},
            (SpeechBody,),
            {"file": "@speech.wav", "language": "en"},
            about="For models that can transcribe. A recording is divided where it is quiet, at most every 30 s.",
            event={"type": "transcript.text.delta", "delta": "Hello"},
            body_kind="multipart/form-data",
        )
        for path, summary in (
            ("/v1/audio/transcriptions", "Writes down speech, as in OpenAI's API"),
            ("/v1/audio/translations", "Writes down speech in English, as in OpenAI's API"),
        )
    ),
    Operation(
        *("POST", "/v1/embeddings", _EMBEDDING, "Turns texts into vectors, as in OpenAI's API"),
        {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.6, -0.8]}],
            "model": _MODEL,
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
        },
        (EmbeddingBody,),
        {"input": ["a text", "another"]},
        about="Vectors have length 1 unless normalize is false. base64 is of float32, little-endian.",
    ),
    *(
        Operation(
            *("POST", path, _EMBEDDING, "Scores pairs of texts, as vLLM does"),
            {
                "id": f"score-{_ID}",
                "object": "list",
                "created": 1795492692,
                "model": _MODEL,
                "data": [{"index": 0, "object": "score", "score": 0.87}],
                "usage": {"prompt_tokens": 9, "total_tokens": 9},
            },
            (ScoreBody,),
            {"text_1": "a question", "text_2": ["a text", "another"]},
            about="A classifier with one label reads each pair; of other models it is the cosine of both embeddings.",
        )
        for path in ("/v1/score", "/score")
    ),
    *(
        Operation(
            *(
                "POST",
                path,
                _EMBEDDING,
                "Sorts documents by how well they fit a query, as Jina and Cohere do",
            ),
            {
                "id": f"rerank-{_ID}",
                "model": _MODEL,
                "results": [{"index": 1, "relevance_score": 0.87, "document": {"text": "another"}}],
                "usage": {"prompt_tokens": 9, "total_tokens": 9},
            },
            (RerankBody,),
            {"query": "a question", "documents": ["a text", "another"], "top_n": 1},
        )
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    Operation(
        *("POST", "/classify", _EMBEDDING, "Labels texts, as vLLM does, with a model that has a classification head"),
        {
            "id": f"classify-{_ID}",
            "object": "list",
            "created": 1795492692,
            "model": _MODEL,
            "data": [{"index": 0, "label": "spam", "probs": [0.98, 0.02], "num_classes": 2}],
            "usage": {"prompt_tokens": 9, "total_tokens": 9},
        },
        (ClassifyBody,),
        {"input": ["a text", "another"]},
    ),
    Operation(
        *("POST", "/tokenize", _TOKENS, "Returns the tokens of a text or of a chat, as vLLM does"),
        {"count": 2, "max_model_len": 2048, "tokens": [319, 289], "token_strs": None},
        (TokenizeText, TokenizeChat),
        {"prompt": "def f"},
    ),
    Operation(
        *("POST", "/detokenize", _TOKENS, "Returns the text of tokens, as vLLM does"),
        {"prompt": "def f"},
        (DetokenizeBody,),
        {"tokens": [319, 289]},
    ),
    Operation("GET", "/v1/models", _HEALTH, "Lists the model that is served", {"object": "list", "data": [_CARD]}),
    Operation("GET", "/v1/models/{name}", _HEALTH, "Describes the model that is served", _CARD),
    Operation("GET", "/version", _HEALTH, "Returns the version of this router", {"version": baton.__version__}),
    Operation("GET", "/livez", _HEALTH, "Answers while the process lives", "ok\n"),
    Operation(
        "GET", "/readyz", _HEALTH, "Answers 200 if requests can be served, otherwise 503 with the reason", "ok\n"
    ),
    Operation("GET", "/health", _HEALTH, "The same as /readyz", "ok\n"),
    Operation("GET", "/metrics", _HEALTH, "Metrics of this router for Prometheus", "# HELP baton_node_up ...\n"),
    Operation(
        *("POST", "/v1/load_lora_adapter", _HEALTH, "Gives a name to an adapter on the nodes, as vLLM does"),
        "Success: sql was given the adapter 3ce30741c727.\n",
        (LoadAdapterBody,),
        {"lora_name": "sql", "lora_path": "/srv/adapters/sql"},
    ),
    Operation(
        *("POST", "/v1/unload_lora_adapter", _HEALTH, "Takes an adapter's name away, as vLLM does"),
        "Success: sql has no adapter any more.\n",
        (UnloadAdapterBody,),
        {"lora_name": "sql"},
    ),
    Operation("GET", "/", _PAGES, "A page to chat with the model", "<!doctype html>"),
    Operation("GET", "/docs", _PAGES, "This description as a page", "<!doctype html>"),
    Operation("GET", "/openapi.json", _PAGES, "This description", {"openapi": "3.1.0"}),
    Operation("GET", "/ui", _PAGES, "A live page of the cluster", "<!doctype html>"),
    Operation("GET", "/ui/data", _PAGES, "The data of the live page", {"cluster": "default"}),
)
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
        "AnthropicError": _schema_of(json.loads(error_object(InvalidRequest("temperature", "must be in [0, 1]"), _ID))),
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
        found = [_body_schema(body, schemas) for body in operation.bodies]
        content = {"schema": found[0] if len(found) == 1 else {"oneOf": found}, "example": operation.example}
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
    for name, found in schema.get("properties", {}).items():
        if found.get("type") == "null":
            continue
        known = {key: value for key, value in found.items() if key not in ("title", "default", "anyOf")}
        if "anyOf" in found:
            kinds = [kind for kind in found["anyOf"] if kind.get("type") != "null"]
            known |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        if name in NUMBER_RANGES and "maximum" not in known:
            allowed = NUMBER_RANGES[name]
            known |= {"exclusiveMinimum" if allowed.above_low else "minimum": allowed.low, "maximum": allowed.high}
        properties[name] = {"description": FIELDS.get(name, ""), **known}
    kept = {key: value for key, value in schema.items() if key not in ("title", "properties")}
    return {**kept, "properties": properties}

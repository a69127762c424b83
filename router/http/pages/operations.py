"""What each path of the HTTP API does, with an example of both directions, for its description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import baton
from baton.messages.sampling import SamplingDefaults
from router.http.audio.forms import SpeechBody
from router.http.bodies.fields import Strict, read_as
from router.http.completions.bodies import ChatBody, CompletionBody
from router.http.completions.tokens import DetokenizeBody, TokenizeChat, TokenizeText
from router.http.messages.bodies import CountBody, MessagesBody
from router.http.pages.status import LoadAdapterBody, UnloadAdapterBody
from router.http.pooling.bodies import ClassifyBody, EmbeddingBody, RerankBody, ScoreBody
from router.http.responses.bodies import ResponsesBody

_MODEL = "demo_model"

EXAMPLE_ID = "req-z14q8xw8esvjh356zwa8ebmfa9"

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


_GENERATING = "Text"

_EMBEDDING = "Embeddings"

_TOKENS = "Tokens"

_HEALTH = "Models and health"

_PAGES = "Pages"

OPERATIONS: Sequence[Operation] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        _GENERATING,
        "Continues a chat, as in OpenAI's API",
        {
            "id": f"chatcmpl-{EXAMPLE_ID}",
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
            "id": f"chatcmpl-{EXAMPLE_ID}",
            "object": "chat.completion.chunk",
            **_HEAD,
            "choices": [{"index": 0, "delta": {"content": "Hello"}, "logprobs": None, "finish_reason": None}],
        },
    ),
    Operation(
        "POST",
        "/v1/completions",
        _GENERATING,
        "Continues a text, or several, as in OpenAI's API",
        {
            "id": f"cmpl-{EXAMPLE_ID}",
            "object": "text_completion",
            **_HEAD,
            "choices": [{"index": 0, "text": "\n    return n", "logprobs": None, **_ENDS}],
            "usage": _USAGE,
        },
        (CompletionBody,),
        {"prompt": "def fibonacci(n):", "max_tokens": 16, "seed": 7},
        about="A stream of several prompts has the choices of all, in their order.",
        event={
            "id": f"cmpl-{EXAMPLE_ID}",
            "object": "text_completion",
            **_HEAD,
            "choices": [{"index": 0, "text": "\n   ", "logprobs": None, "finish_reason": None}],
        },
    ),
    Operation(
        "POST",
        "/v1/messages",
        _GENERATING,
        "Continues a conversation, as in Anthropic's API",
        {
            "id": f"msg_{EXAMPLE_ID}",
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
        "POST",
        "/v1/messages/count_tokens",
        _TOKENS,
        "Counts the tokens of a conversation, as in Anthropic's API",
        {"input_tokens": 10},
        (CountBody,),
        {"model": _MODEL, "messages": _HELLO},
    ),
    Operation(
        "POST",
        "/v1/responses",
        _GENERATING,
        "Continues a conversation that the router keeps, as in OpenAI's API",
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
        "POST",
        "/v1/responses/input_tokens",
        _TOKENS,
        "Counts the tokens of a response's input, as in OpenAI's API",
        {"object": "response.input_tokens", "input_tokens": 10},
        (ResponsesBody,),
        {"input": "Hello"},
    ),
    Operation("GET", _STORED, _GENERATING, "Returns a stored response", _RESPONSE),
    Operation(
        "DELETE",
        _STORED,
        _GENERATING,
        "Deletes a stored response",
        {"id": _RESPONSE["id"], "object": "response", "deleted": True},
    ),
    Operation(
        "GET",
        f"{_STORED}/input_items",
        _GENERATING,
        "Lists the conversation before a stored response, in pages",
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
        "POST",
        f"{_STORED}/cancel",
        _GENERATING,
        "Is refused: only responses in the background could be cancelled",
        {"error": {"message": "...", "type": "invalid_request_error", "param": None, "code": None}},
        status=400,
    ),
    *(
        Operation(
            "POST",
            path,
            _GENERATING,
            summary,
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
        "POST",
        "/v1/embeddings",
        _EMBEDDING,
        "Turns texts into vectors, as in OpenAI's API",
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
            "POST",
            path,
            _EMBEDDING,
            "Scores pairs of texts, as vLLM does",
            {
                "id": f"score-{EXAMPLE_ID}",
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
                "id": f"rerank-{EXAMPLE_ID}",
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
        "POST",
        "/classify",
        _EMBEDDING,
        "Labels texts, as vLLM does, with a model that has a classification head",
        {
            "id": f"classify-{EXAMPLE_ID}",
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
        "POST",
        "/tokenize",
        _TOKENS,
        "Returns the tokens of a text or of a chat, as vLLM does",
        {"count": 2, "max_model_len": 2048, "tokens": [319, 289], "token_strs": None},
        (TokenizeText, TokenizeChat),
        {"prompt": "def f"},
    ),
    Operation(
        "POST",
        "/detokenize",
        _TOKENS,
        "Returns the text of tokens, as vLLM does",
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
        "POST",
        "/v1/load_lora_adapter",
        _HEALTH,
        "Gives a name to an adapter on the nodes, as vLLM does",
        "Success: sql was given the adapter 3ce30741c727.\n",
        (LoadAdapterBody,),
        {"lora_name": "sql", "lora_path": "/srv/adapters/sql"},
    ),
    Operation(
        "POST",
        "/v1/unload_lora_adapter",
        _HEALTH,
        "Takes an adapter's name away, as vLLM does",
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

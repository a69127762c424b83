"""The common part of the endpoints that make vectors of texts: from a client's body to the vectors of its inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from starlette.types import Receive, Scope, Send

from baton.messages.generation import Finished
from router.http.answers import path_headers
from router.http.bodies.pooling import PoolingBody
from router.http.bodies.strict import read_as
from router.http.client import Client
from router.http.endpoints import Handler, check_request_id, in_thread_if_large, timeout_of, with_client_names
from router.http.json_body import parse_json, read_body
from router.http.model import ServedModel
from router.pooling import PoolingCall, pool_all

B = TypeVar("B", bound=PoolingBody)


class Response(NamedTuple):
    """The answer to a client."""

    json: bytes
    first: Finished
    """The end of the first request to the core, for headers."""


_NAMES: Mapping[str, Sequence[str]] = {"request_id": ("request_id", "x-request-id")}
_MANY = 16
"""An answer of more results than this is written in a thread: hundreds of vectors would hold the event loop."""


class PoolingEndpoint(Generic[B]):
    """An ASGI application, whose exceptions the front turns into answers."""

    body: type[B]

    def __init__(self, handler: Handler, model: ServedModel) -> None:
        self._handler = handler
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, request_id = dict(scope["headers"]), scope["state"]["request_id"]
        content = await read_body(scope, receive)
        found = await in_thread_if_large(self._handler, content, parse_json, content)
        timeout_s = timeout_of(headers.get(b"x-request-timeout-ms"))
        traceparent = headers.get(b"traceparent", b"").decode("latin-1")
        with with_client_names(_NAMES, found):
            body = await in_thread_if_large(self._handler, content, read_as, self.body, found)
            check_request_id(body.request_id, request_id)
            async with Client(receive, send) as client:
                call = body.call(request_id, traceparent)
                answer, first = await self._respond(body, call, timeout_s)
                answer_headers = [
                    (b"content-type", b"application/json"),
                    (b"x-request-id", request_id.encode()),
                    *path_headers(first),
                ]
                await client.answer(200, answer_headers, answer)

    async def _respond(self, body: B, call: PoolingCall, timeout_s: float | None) -> Response:
        """The answer to a body; raises BatonError."""
        results = await pool_all(call, self._handler, self._model.vocabulary, self._model.card, timeout_s)
        return Response(await self._written(len(results), self._answer, body, call, results), results[0])

    async def _written(self, num_results: int, write: Callable[..., bytes], *arguments: object) -> bytes:
        """What `write` makes of an answer's results, in a thread if there are many."""
        return await self._handler.in_thread(write, *arguments) if num_results > _MANY else write(*arguments)

    def _answer(self, body: B, call: PoolingCall, results: Sequence[Finished]) -> bytes:
        """The JSON of the answer. May be called in a thread."""
        raise NotImplementedError


def usage_of(results: Sequence[Finished]) -> dict[str, Any]:
    """The field `usage` of an answer."""
    num_tokens = sum(one.prompt_tokens for one in results)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def as_json(answer: Mapping[str, Any]) -> bytes:
    """The answer as JSON text."""
    return json.dumps(answer, ensure_ascii=False).encode()

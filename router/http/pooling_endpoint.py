"""The common part of the endpoints that make vectors of texts: from a client's body to the vectors of its inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from starlette.types import Receive, Scope, Send

from baton.messages.generation import Finished
from baton.messages.request_limits import MAX_POOLING_BODY_BYTES
from router.http.answers import path_headers
from router.http.bodies.pooling import PoolingBody
from router.http.bodies.strict import read_as
from router.http.client import Client
from router.http.endpoints import Handler, check_request_id, in_thread_if_large, timeout_of, with_client_names
from router.http.json_body import LargeBodies, LargeBody, parse_json, read_body
from router.http.model import ServedModel
from router.pooling import SMALL_VECTORS, PoolingCall, pool_all

B = TypeVar("B", bound=PoolingBody)


class Response(NamedTuple):
    """The answer to a client."""

    json: bytes
    first: Finished
    """The end of the first request to the core, for headers."""


_NAMES: Mapping[str, Sequence[str]] = {
    "request_id": ("request_id", "x-request-id"),
    "activate": ("use_activation", "activation"),
}


class PoolingEndpoint(Generic[B]):
    """An ASGI application, whose exceptions the front turns into answers."""

    body: type[B]

    def __init__(self, handler: Handler, model: ServedModel) -> None:
        self._handler = handler
        self._model = model
        self._large_bodies = LargeBodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._large_bodies.place() as place:
            await self._answer_body(scope, receive, send, place)

    async def _answer_body(self, scope: Scope, receive: Receive, send: Send, place: LargeBody) -> None:
        headers, request_id = dict(scope["headers"]), scope["state"]["request_id"]
        content = await read_body(scope, receive, MAX_POOLING_BODY_BYTES, place)
        found = await in_thread_if_large(self._handler, content, parse_json, content)
        timeout_s = timeout_of(headers.get(b"x-request-timeout-ms"))
        traceparent = headers.get(b"traceparent", b"").decode("latin-1")
        # The JSON is large, so only its names stay.
        sent = {name: True for name, value in found.items() if value is not None}
        with with_client_names(_NAMES, sent):
            body = await in_thread_if_large(self._handler, content, read_as, self.body, found)
            check_request_id(body.request_id, request_id)
            del content, found
            place.release()
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
        num_bytes = sum(len(one.embedding) for one in results)
        return Response(await self._written(num_bytes, self._answer, body, call, results), results[0])

    async def _written(self, num_bytes: int, write: Callable[..., bytes], *arguments: object) -> bytes:
        """What `write` makes of results of so many bytes, in a thread if they are many."""
        return await self._handler.in_thread(write, *arguments) if num_bytes > SMALL_VECTORS else write(*arguments)

    def _answer(self, body: B, call: PoolingCall, results: Sequence[Finished]) -> bytes:
        """The JSON of the answer. May be called in a thread."""
        raise NotImplementedError


def usage_of(results: Sequence[Finished]) -> dict[str, Any]:
    """The field `usage` of an answer."""
    num_tokens = sum(one.prompt_tokens for one in results)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def as_json(answer: Mapping[str, Any]) -> bytes:
    """The answer as JSON text. An iterator becomes an array, which is written one item at a time: one call for
    hundreds of vectors would keep the interpreter from the event loop for as long as it takes, even in a thread."""
    return b"{" + b", ".join(b"%b: %b" % (_dumped(name), _dumped(value)) for name, value in answer.items()) + b"}"


def _dumped(value: Any) -> bytes:
    if isinstance(value, Iterator):
        return b"[" + b", ".join(map(_dumped, value)) + b"]"
    return json.dumps(value, ensure_ascii=False).encode()

"""The endpoint /v1/embeddings: each input is a request to the core, and their vectors are one answer."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from baton.errors import BatonError, InvalidRequest
from baton.messages.generation import Finished, GenerateRequest
from router.admission.validation import check_model
from router.http.answers import accepted_of, path_headers
from router.http.bodies.embeddings import EmbeddingBody
from router.http.bodies.strict import read_as
from router.http.client import Client
from router.http.endpoints import (
    Handler,
    check_request_id,
    gather_all,
    in_thread_if_large,
    part_ids,
    timeout_of,
    truncated,
    with_client_names,
)
from router.http.json_body import parse_json, read_body
from router.http.model import ServedModel

_MOST_AT_ONCE = 32
"""The most inputs of one call that are sent to the core at once. The others wait here, and not in the queue of all
clients."""
_NAMES: Mapping[str, Sequence[str]] = {"request_id": ("request_id", "x-request-id")}


class _Part(NamedTuple):
    """The result of one input."""

    json: str
    """Written as soon as the vector is there: writing hundreds at once would hold the event loop for a second."""
    finished: Finished


class Embeddings:
    """POST /v1/embeddings: an ASGI application, whose exceptions the front turns into answers."""

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
            body = await in_thread_if_large(self._handler, content, read_as, EmbeddingBody, found)
            check_request_id(body.request_id, request_id)
            self._check_dimensions(body)
            async with Client(receive, send) as client:
                inputs = await in_thread_if_large(self._handler, content, self._inputs, body)
                parts = await self._embed_all(body, inputs, request_id, traceparent, timeout_s)
                answer_headers = [
                    (b"content-type", b"application/json"),
                    (b"x-request-id", request_id.encode()),
                    *path_headers(parts[0].finished),
                ]
                await client.answer(200, answer_headers, _answer_of(self._model.card.name, parts))

    def _inputs(self, body: EmbeddingBody) -> Sequence[str | Sequence[int]]:
        """The inputs as the core gets them: of each the last tokens, if that is wanted. May be called in a thread."""
        most = body.truncate_prompt_tokens
        if most is None:
            return body.inputs
        longest, encode = self._model.card.max_model_len, self._model.encode
        ids = [encode(one, special=True, field="input") if isinstance(one, str) else one for one in body.inputs]
        return [truncated(one, most, longest) for one in ids]

    def _check_dimensions(self, body: EmbeddingBody) -> None:
        """Check the wanted number of dimensions; if no node has reported its own yet, the vector is checked later."""
        check_model(body.model or "", self._model.card)
        if size := self._model.card.embedding_size:
            self._check_size(body, size)

    def _check_size(self, body: EmbeddingBody, size: int) -> None:
        if body.dimensions not in (None, size):
            message = f"must be {size}, or left out: embeddings of {self._model.card.name} can't be cut"
            raise InvalidRequest("dimensions", message)

    async def _embed_all(
        self,
        body: EmbeddingBody,
        inputs: Sequence[str | Sequence[int]],
        request_id: str,
        traceparent: str,
        timeout_s: float | None,
    ) -> Sequence[_Part]:
        """Embed all inputs; the first error ends the others."""
        room = asyncio.Semaphore(min(_MOST_AT_ONCE, self._handler.most_at_once() or _MOST_AT_ONCE))
        loop = asyncio.get_running_loop()
        due = None if timeout_s is None else loop.time() + timeout_s
        write = _as_base64 if body.encoding_format == "base64" else _as_numbers

        async def embed(place: int, name: str) -> _Part:
            field = "input" if len(inputs) == 1 else f"input[{place}]"
            async with room:
                left_s = None if due is None else max(0.0, due - loop.time())
                with with_client_names({"prompt": (field,)}, {}):
                    finished = await self._embed(body.request(inputs[place], name, traceparent), left_s)
                self._check_size(body, len(finished.embedding) // 4)
                item = {"object": "embedding", "index": place, "embedding": write(finished.embedding)}
                return _Part(json.dumps(item), finished)

        return await gather_all([embed(*part) for part in enumerate(part_ids(request_id, len(inputs)))])

    async def _embed(self, request: GenerateRequest, timeout_s: float | None) -> Finished:
        async with aclosing(self._handler.generate(request, timeout_s)) as events:
            await accepted_of(events)
            async for event in events:
                if isinstance(event, Finished) and event.embedding:
                    return event
        raise BatonError("a request for an embedding ended without one")


def _answer_of(model: str, parts: Sequence[_Part]) -> bytes:
    num_tokens = sum(part.finished.prompt_tokens for part in parts)
    rest = json.dumps({"model": model, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}})
    data = ", ".join(part.json for part in parts)
    return f'{{"object": "list", "data": [{data}], {rest[1:]}'.encode()


def _as_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def _as_numbers(vector: bytes) -> Sequence[float]:
    """The numbers of a vector; written as JSON and read again, each is the same float32."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)

"""The endpoints that make vectors, labels and scores of texts: /v1/embeddings, /classify, /score and /rerank."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from baton.clock import Clock
from baton.messages.generation import Finished
from baton.messages.request_limits import MAX_POOLING_BODY_BYTES
from router.handler import Handler
from router.http.answers import path_headers
from router.http.bodies.fields import read_as
from router.http.client import Client
from router.http.endpoint import JSON, BodyEndpoint, HttpCall
from router.http.model import ServedModel
from router.http.pooling.bodies import ClassifyBody, EmbeddingBody, PoolingBody, RerankBody, ScoreBody, ScoringBody
from router.pooling import SMALL_VECTORS, PoolingCall, Scores, TextPair, numbers_of, pool_all, score_pairs

B = TypeVar("B", bound=PoolingBody)


class Response(NamedTuple):
    """The answer to a client."""

    json: bytes
    first: Finished
    """The end of the first request to the core, for headers."""


class PoolingEndpoint(BodyEndpoint, Generic[B]):
    """The common part of these endpoints."""

    body: type[B]
    max_body_bytes = MAX_POOLING_BODY_BYTES

    def __init__(self, handler: Handler, model: ServedModel, clock: Clock) -> None:
        super().__init__(handler, model)
        self._clock = clock

    async def _answer(self, client: Client, call: HttpCall) -> None:
        timeout_s = call.timeout_s
        body = await call.in_thread(read_as, self.body, call.found)
        call.check_request_id(body.request_id)
        call.release()
        answer, first = await self._respond(body, body.call(call.request_id, call.traceparent), timeout_s)
        headers = [JSON, *self.error_form.id_headers(call.request_id), *path_headers(first)]
        await client.answer(200, headers, answer)

    async def _respond(self, body: B, call: PoolingCall, timeout_s: float | None) -> Response:
        """The answer to a body; raises BatonError."""
        results = await pool_all(call, self._handler, self._model.vocabulary, self._model.card, timeout_s)
        num_bytes = sum(len(result.embedding) for result in results)
        return Response(await self._written(num_bytes, self._json, body, call, results), results[0])

    async def _written(self, num_bytes: int, write: Callable[..., bytes], *arguments: object) -> bytes:
        """What `write` makes of results of so many bytes, in a thread if they are many."""
        return await self._handler.in_thread(write, *arguments) if num_bytes > SMALL_VECTORS else write(*arguments)

    def _json(self, body: B, call: PoolingCall, results: Sequence[Finished]) -> bytes:
        """The JSON of the answer. May be called in a thread."""
        raise NotImplementedError


def usage_of(results: Sequence[Finished]) -> dict[str, Any]:
    """The field `usage` of an answer."""
    num_tokens = sum(result.prompt_tokens for result in results)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def as_json(answer: Mapping[str, Any]) -> bytes:
    """The answer as JSON text. An iterator becomes an array, which is written one item at a time: one call for
    hundreds of vectors would keep the interpreter from the event loop for as long as it takes, even in a thread."""
    return b"{" + b", ".join(b"%b: %b" % (_dumped(name), _dumped(value)) for name, value in answer.items()) + b"}"


def _dumped(value: Any) -> bytes:
    if isinstance(value, Iterator):
        return b"[" + b", ".join(map(_dumped, value)) + b"]"
    return json.dumps(value, ensure_ascii=False).encode()


class Embeddings(PoolingEndpoint[EmbeddingBody]):
    """POST /v1/embeddings"""

    body = EmbeddingBody

    def _json(self, body: EmbeddingBody, call: PoolingCall, results: Sequence[Finished]) -> bytes:
        write = _as_base64 if body.encoding_format == "base64" else numbers_of
        return as_json(
            {
                "object": "list",
                "data": (
                    {"object": "embedding", "index": index, "embedding": write(result.embedding)}
                    for index, result in enumerate(results)
                ),
                "model": body.model or self._model.card.name,
                "usage": usage_of(results),
            }
        )


def _as_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


S = TypeVar("S", bound=ScoringBody)


class Classify(PoolingEndpoint[ClassifyBody]):
    """POST /classify"""

    body = ClassifyBody

    def _json(self, body: ClassifyBody, call: PoolingCall, results: Sequence[Finished]) -> bytes:
        labels = self._model.card.pooling.labels
        return as_json(
            {
                "id": f"classify-{call.request_id}",
                "object": "list",
                "created": int(self._clock.wall()),
                "model": body.model or self._model.card.name,
                "data": (_classified(index, result, labels) for index, result in enumerate(results)),
                "usage": usage_of(results),
            }
        )


def _classified(index: int, result: Finished, labels: Sequence[str]) -> Mapping[str, Any]:
    probs = numbers_of(result.embedding)
    best = max(range(len(probs)), key=probs.__getitem__)
    label = labels[best] if best < len(labels) else None
    return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}


class _ScoringEndpoint(PoolingEndpoint[S]):
    """The common part of scores and rankings."""

    async def _respond(self, body: S, call: PoolingCall, timeout_s: float | None) -> Response:
        pairs = body.pairs()
        scored = await score_pairs(pairs, call, self._handler, self._model.vocabulary, self._model.card, timeout_s)
        answer = await self._written(body.num_answer_bytes(pairs), self._write, body, call, pairs, scored)
        return Response(answer, scored.results[0])

    def _write(self, body: S, call: PoolingCall, pairs: Sequence[TextPair], scored: Scores) -> bytes:
        """The JSON of the answer. May be called in a thread."""
        raise NotImplementedError


class Score(_ScoringEndpoint[ScoreBody]):
    """POST /score"""

    body = ScoreBody

    def _write(self, body: ScoreBody, call: PoolingCall, pairs: Sequence[TextPair], scored: Scores) -> bytes:
        return as_json(
            {
                "id": f"score-{call.request_id}",
                "object": "list",
                "created": int(self._clock.wall()),
                "model": body.model or self._model.card.name,
                "data": (
                    {"index": index, "object": "score", "score": score} for index, score in enumerate(scored.scores)
                ),
                "usage": usage_of(scored.results),
            }
        )


class Rerank(_ScoringEndpoint[RerankBody]):
    """POST /rerank"""

    body = RerankBody

    def _write(self, body: RerankBody, call: PoolingCall, pairs: Sequence[TextPair], scored: Scores) -> bytes:
        order = sorted(range(len(pairs)), key=lambda index: (-scored.scores[index], index))
        if body.top_n:
            order = order[: body.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scored.scores[index]} for index in order]
        if body.return_documents is not False:
            for result in results:
                document = body.documents[result["index"]]
                result["document"] = {"text": document} if isinstance(document, str) else document
        return as_json(
            {
                "id": f"rerank-{call.request_id}",
                "model": body.model or self._model.card.name,
                "results": iter(results),
                "usage": usage_of(scored.results),
            }
        )

"""The endpoints /classify, /score and /rerank: labels of texts, and how well texts fit each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from baton.clock import Clock
from baton.messages.generation import Finished
from router.http.bodies.scores import ClassifyBody, RerankBody, ScoreBody, ScoringBody
from router.http.endpoints import Handler
from router.http.model import ServedModel
from router.http.pooling_endpoint import PoolingEndpoint, Response, as_json, usage_of
from router.pooling import PoolingCall, Scores, TextPair, numbers_of, score_pairs

S = TypeVar("S", bound=ScoringBody)


class Classify(PoolingEndpoint[ClassifyBody]):
    """POST /classify"""

    body = ClassifyBody

    def __init__(self, handler: Handler, model: ServedModel, clock: Clock) -> None:
        super().__init__(handler, model)
        self._clock = clock

    def _answer(self, body: ClassifyBody, call: PoolingCall, results: Sequence[Finished]) -> bytes:
        labels = self._model.card.pooling.labels
        return as_json(
            {
                "id": f"classify-{call.request_id}",
                "object": "list",
                "created": int(self._clock.wall()),
                "model": body.model or self._model.card.name,
                "data": (_classified(place, one, labels) for place, one in enumerate(results)),
                "usage": usage_of(results),
            }
        )


def _classified(place: int, result: Finished, labels: Sequence[str]) -> Mapping[str, Any]:
    probs = numbers_of(result.embedding)
    best = max(range(len(probs)), key=probs.__getitem__)
    label = labels[best] if best < len(labels) else None
    return {"index": place, "label": label, "probs": probs, "num_classes": len(probs)}


class _ScoringEndpoint(PoolingEndpoint[S]):
    """The common part of scores and rankings."""

    def __init__(self, handler: Handler, model: ServedModel, clock: Clock) -> None:
        super().__init__(handler, model)
        self._clock = clock

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
                    {"index": place, "object": "score", "score": score} for place, score in enumerate(scored.scores)
                ),
                "usage": usage_of(scored.results),
            }
        )


class Rerank(_ScoringEndpoint[RerankBody]):
    """POST /rerank"""

    body = RerankBody

    def _write(self, body: RerankBody, call: PoolingCall, pairs: Sequence[TextPair], scored: Scores) -> bytes:
        order = sorted(range(len(pairs)), key=lambda place: (-scored.scores[place], place))
        if body.top_n:
            order = order[: body.top_n]
        results: list[dict[str, Any]] = [{"index": place, "relevance_score": scored.scores[place]} for place in order]
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

"""The call Embed of the public service: embeddings, labels or scores, over the same paths as those of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.errors import InvalidRequest
from baton.messages.generation import Finished, ModelCard
from baton.messages.ids import REQUEST_ID_PATTERN
from baton.messages.pooling import (
    EmbedInput,
    EmbedRequest,
    EmbedResponse,
    EmbedResult,
    EmbedTask,
    Pooling,
    PoolingRequest,
)
from router.pooling import (
    SMALL_VECTORS,
    PoolingCall,
    PoolingHandler,
    PoolingInput,
    PoolingVocabulary,
    numbers_of,
    pool_all,
)
from router.scoring import TextPair, score_pairs


async def embed(
    request: EmbedRequest,
    handler: PoolingHandler,
    vocabulary: PoolingVocabulary | None,
    card: ModelCard,
    timeout_s: float | None,
) -> EmbedResponse:
    """The results of all inputs of a call with an id. Raises InvalidRequest, and what the core raises."""
    if not request.inputs:
        raise InvalidRequest("inputs", "is empty")
    if not REQUEST_ID_PATTERN.match(request.request_id):
        raise InvalidRequest("request_id", "must be 1 to 64 letters, digits or _ . : -")
    if request.pooling is Pooling.CLASSIFY:
        raise InvalidRequest("pooling", "can't be classify: that is a task")
    if request.pooling is Pooling.ALIGN:
        raise InvalidRequest("pooling", "can't be align: the times of words come with their transcript over HTTP")
    most = request.truncate_prompt_tokens
    if most is not None and not (most == -1 or most >= 1):
        raise InvalidRequest("truncate_prompt_tokens", f"must be -1 or at least 1, not {most}")
    is_classified = request.task is EmbedTask.CLASSIFY
    call = PoolingCall(
        inputs=(),
        pooling=PoolingRequest(
            Pooling.CLASSIFY if is_classified else request.pooling,
            request.normalize,
            request.dimensions,
            activate=request.activate is not False,
        ),
        request_id=request.request_id,
        model=request.model,
        priority=request.priority,
        cache_salt=request.cache_salt,
        traceparent=request.traceparent,
        truncate=most,
    )
    if request.task is EmbedTask.SCORE:
        pairs = [_pair(one, place) for place, one in enumerate(request.inputs)]
        scored = await score_pairs(pairs, call, handler, vocabulary, card, timeout_s)
        results: Sequence[EmbedResult] = [EmbedResult((score,)) for score in scored.scores]
        return EmbedResponse(call.request_id, results, _num_tokens(scored.results))
    inputs = [_input(one, place, is_pair=is_classified) for place, one in enumerate(request.inputs)]
    ends = await pool_all(replace(call, inputs=inputs), handler, vocabulary, card, timeout_s)
    labels = card.pooling.labels if is_classified else ()
    if sum(len(one.embedding) for one in ends) <= SMALL_VECTORS:
        results = _results(ends, labels)
    else:
        results = await handler.in_thread(_results, ends, labels)
    return EmbedResponse(call.request_id, results, _num_tokens(ends))


def _results(ends: Sequence[Finished], labels: Sequence[str]) -> Sequence[EmbedResult]:
    vectors = [numbers_of(one.embedding) for one in ends]
    return [EmbedResult(vector, labels[vector.index(max(vector))] if labels else "") for vector in vectors]


def _input(one: EmbedInput, place: int, *, is_pair: bool) -> PoolingInput:
    field = f"inputs[{place}]"
    if not one.prompt:
        raise InvalidRequest(field, "is empty")
    if one.second_text is not None and not (is_pair and isinstance(one.prompt, str)):
        raise InvalidRequest(f"{field}.second_text", "needs a text, and a task that takes pairs")
    return PoolingInput(one.prompt, one.second_text, field)


def _pair(one: EmbedInput, place: int) -> TextPair:
    field = f"inputs[{place}]"
    if not isinstance(one.prompt, str) or one.second_text is None:
        raise InvalidRequest(field, "must have text and second_text: a score is of a pair of texts")
    return TextPair(one.prompt, one.second_text, f"{field}.text", f"{field}.second_text")


def _num_tokens(ends: Sequence[Finished]) -> int:
    return sum(one.prompt_tokens for one in ends)

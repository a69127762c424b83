"""Scores of pairs of texts: by a classifier with one label, or by the cosine of the embeddings of both texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from baton.errors import InvalidRequest
from baton.messages.generation import Finished, ModelCard
from baton.messages.pooling import Pooling, PoolingRequest
from baton.messages.request_limits import MAX_INPUTS
from baton.text.detokenizer import TextCodec
from router.pooling import (
    SMALL_VECTORS,
    PoolingCall,
    PoolingHandler,
    PoolingInput,
    numbers_of,
    pool_all,
)


class TextPair(NamedTuple):
    """Two texts, each with the client's field for refusals."""

    first: str
    second: str
    first_field: str
    second_field: str


class Scores(NamedTuple):
    """The scores of a call's pairs, in their order."""

    scores: Sequence[float]
    results: Sequence[Finished]
    """The end of each request to the core; of an embedding model one for each distinct text."""


async def score_pairs(
    pairs: Sequence[TextPair],
    call: PoolingCall,
    handler: PoolingHandler,
    vocabulary: TextCodec | None,
    card: ModelCard,
    timeout_s: float | None,
) -> Scores:
    """The scores of pairs. `call`: what all requests have in common; its inputs are ignored.

    Of a classifier a score is what its only label gets for the pair, after its activation unless `call.pooling` says
    otherwise. Raises InvalidRequest, and what the core raises.
    """
    if len(pairs) > MAX_INPUTS:
        raise InvalidRequest(pairs[0].second_field, f"makes {len(pairs)} pairs; at most {MAX_INPUTS} are scored")
    if card.pooling.labels:
        if len(card.pooling.labels) > 1:
            message = f"{card.name} gives {len(card.pooling.labels)} labels, and a score is one number: use /classify"
            raise InvalidRequest("model", message)
        inputs = [
            PoolingInput(pair.first, pair.second, pair.first_field, pair.second_field, call.most_second_tokens)
            for pair in pairs
        ]
        pooling = PoolingRequest(Pooling.CLASSIFY, activate=call.pooling.activate)
        results = await pool_all(replace(call, inputs=inputs, pooling=pooling), handler, vocabulary, card, timeout_s)
        return Scores([numbers_of(one.embedding)[0] for one in results], results)
    if not call.pooling.activate:
        raise InvalidRequest("activate", f"is for classifiers alone: of {card.name} a score is a cosine")
    if call.pooling.normalize is False:
        raise InvalidRequest("normalize", "must not be false: a score is the cosine of the embeddings")
    places: dict[tuple[str, int | None], int] = {}
    inputs, most = [], call.most_second_tokens
    for pair in pairs:
        for text, field, cut in ((pair.first, pair.first_field, None), (pair.second, pair.second_field, most)):
            if places.setdefault((text, cut), len(places)) == len(inputs):
                inputs.append(PoolingInput(text, field=field, most_tokens=cut))
    pooling = replace(call.pooling, normalize=True)
    # A call of so many pairs has up to twice as many texts.
    call = replace(call, inputs=inputs, pooling=pooling, most_inputs=2 * MAX_INPUTS)
    results = await pool_all(call, handler, vocabulary, card, timeout_s)
    vectors = [one.embedding for one in results]
    compared = [(places[pair.first, None], places[pair.second, most]) for pair in pairs]
    num_bytes = sum(map(len, vectors)) + len(pairs) * len(vectors[0])
    if num_bytes <= SMALL_VECTORS:
        return Scores(cosines(vectors, compared), results)
    return Scores(await handler.in_thread(cosines, vectors, compared), results)


def cosines(vectors: Sequence[bytes], pairs: Sequence[tuple[int, int]]) -> list[float]:
    """The cosines of pairs of vectors of length 1, by their places. May be called in a thread.

    A product of two float32 is exact in float64, and the sum is rounded once: it depends on no order.
    """
    numbers = [np.frombuffer(vector, dtype="<f4").astype(np.float64) for vector in vectors]
    return [math.fsum((numbers[one] * numbers[other]).tolist()) for one, other in pairs]

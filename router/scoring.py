"""Scores of pairs of texts: by a classifier with one label, or by the cosine of the embeddings of both texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from baton.errors import InvalidRequest
from baton.messages.generation import Finished, ModelCard
from baton.messages.pooling import Pooling, PoolingRequest
from baton.messages.request_limits import MAX_INPUTS
from router.pooling import PoolingCall, PoolingHandler, PoolingInput, PoolingVocabulary, cosine, numbers_of, pool_all


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
    vocabulary: PoolingVocabulary | None,
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
        inputs = [PoolingInput(pair.first, pair.second, pair.second_field) for pair in pairs]
        pooling = PoolingRequest(Pooling.CLASSIFY, activate=call.pooling.activate)
        results = await pool_all(replace(call, inputs=inputs, pooling=pooling), handler, vocabulary, card, timeout_s)
        return Scores([numbers_of(one.embedding)[0] for one in results], results)
    places: dict[str, int] = {}
    inputs = []
    for pair in pairs:
        for text, field in ((pair.first, pair.first_field), (pair.second, pair.second_field)):
            if places.setdefault(text, len(places)) == len(inputs):
                inputs.append(PoolingInput(text, field=field))
    pooling = replace(call.pooling, normalize=True)
    results = await pool_all(replace(call, inputs=inputs, pooling=pooling), handler, vocabulary, card, timeout_s)
    vectors = [one.embedding for one in results]
    return Scores([cosine(vectors[places[pair.first]], vectors[places[pair.second]]) for pair in pairs], results)

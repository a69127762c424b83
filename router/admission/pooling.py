"""Checks what a client asks of pooling against what the model can do. Errors name the field."""

from __future__ import annotations

from baton.errors import InvalidRequest
from baton.messages.capabilities import Capability
from baton.messages.generation import ModelCard
from baton.messages.pooling import EMBEDDING_KINDS, Pooling, PoolingParams, PoolingRequest
from router.admission.capable import check_can


def pooling_params(request: PoolingRequest, card: ModelCard, num_tokens: int) -> PoolingParams:
    """The parameters of a request whose prompt has so many tokens, with every default; raises InvalidRequest."""
    check_pooling(request, card)
    if not 0 <= request.second_start <= num_tokens:
        raise InvalidRequest("prompt", f"has {num_tokens} tokens, and a second text behind {request.second_start}")
    model = card.pooling
    kind = model.default if request.kind is None else request.kind
    return PoolingParams(
        kind,
        model.normalizes if request.normalize is None else request.normalize,
        0 if kind not in EMBEDDING_KINDS else request.dimensions or 0,
        request.activate,
        request.second_start,
        request.num_rows,
    )


def check_generates(card: ModelCard) -> None:
    """Raises InvalidRequest for a model that generates nothing."""
    if not card.pooling.generates:
        kind = "an encoder" if card.pooling.is_encoder else "a classifier"
        can = card.pooling.capabilities
        paths = ["/v1/embeddings"]
        paths += ["/v1/score", "/v1/rerank"] if Capability.SCORE in can else []
        paths += ["/classify"] if Capability.CLASSIFY in can else []
        raise InvalidRequest("model", f"{card.name} is {kind}, which generates nothing: use {' or '.join(paths)}")


def check_pooling(request: PoolingRequest, card: ModelCard) -> None:
    """Raises InvalidRequest for a vector that this model can't make."""
    if request.kind is Pooling.CLASSIFY:
        if not card.pooling.labels:
            raise InvalidRequest("model", f"{card.name} has no classification head: it makes embeddings")
        if request.dimensions is not None:
            raise InvalidRequest("dimensions", "is of embeddings; a classification has a number for each label")
        return
    if request.dimensions is not None and request.dimensions < 1:
        raise InvalidRequest("dimensions", f"must be at least 1, not {request.dimensions}")
    if request.kind is Pooling.ALIGN:
        check_can(card, Capability.ALIGN)
    else:
        check_dimensions(request.dimensions, card, card.embedding_size)


def check_dimensions(dimensions: int | None, card: ModelCard, size: int) -> None:
    """Raises InvalidRequest if embeddings of `size` numbers can't be cut to `dimensions`.

    Size 0: no node has reported it yet, and the vector is checked when it is there.
    """
    if dimensions is None or not size or dimensions == size:
        return
    if why := card.pooling.why_not_cut(dimensions, size):
        raise InvalidRequest("dimensions", f"{why} ({card.name})")

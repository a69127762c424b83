"""Checks of single fields: against bounds, the vocabulary, and what the model can do. Errors name the field."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import ContextLengthExceeded, InvalidRequest, UnknownModel
from baton.messages.generation import ModelCard
from baton.messages.node_model import Capability, check_capable
from baton.messages.pooling import EMBEDDING_KINDS, Pooling, PoolingParams, PoolingRequest

_ALL = frozenset(Capability)


def check_can(card: ModelCard, capability: Capability, *, is_taken: bool = True) -> None:
    """Raises UnsupportedRequest for a model that can't do this, or whose router does not take it.

    A model of which no node is known yet may be able to do everything.
    """
    can = card.capabilities or _ALL
    check_capable(card.name, {capability}, can if is_taken else can - {capability})


def too_long(field: str, num_tokens: int, longest: int, card: ModelCard, what: str = "tokens") -> ContextLengthExceeded:
    """The refusal of a prompt with so many tokens, of which the model takes at most `longest`."""
    reason = f"has {num_tokens} {what}; {card.name} takes at most {longest}"
    return ContextLengthExceeded(field, reason, num_tokens, longest, card.max_model_len)


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


def check_model(name: str, card: ModelCard) -> None:
    """Raises UnknownModel unless the name is the card's, that of an adapter, or empty."""
    if name not in ("", card.name) and name not in card.adapters:
        raise UnknownModel("model", f"{name[:80]!r} is not served here; there is {card.name!r}")


def check_text(field: str, text: str, max_bytes: int) -> None:
    """Raises InvalidRequest for text that is not valid Unicode, or that is too long.

    NUL is accepted: a model may write it, and a client may send back what a model wrote.
    """
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(field, "is not valid UTF-8") from None
    if num_bytes > max_bytes:
        raise InvalidRequest(field, f"has {num_bytes} bytes; at most {max_bytes} are taken")


def check_name(field: str, text: str, max_bytes: int) -> None:
    """Check a text like `check_text`, and refuse NUL in it, since no model has written this text."""
    check_text(field, text, max_bytes)
    if "\0" in text:
        raise InvalidRequest(field, "contains NUL")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest that names the first token id which is not in the vocabulary."""
    # Without a step of Python for each id: prompts have a hundred thousand.
    if not token_ids or (set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for position, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidRequest(field, f"token {position} is {token!r}; ids are 0 to {vocab_size - 1}")


def check_integer(field: str, value: int, low: int, high: int) -> int:
    """The value; raises InvalidRequest unless it is from `low` to `high`."""
    if not low <= value <= high:
        raise InvalidRequest(field, f"must be {low} to {high}, not {value}")
    return value

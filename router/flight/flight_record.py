"""The record of a flight, with which another router can continue it: the request without its prompt, and the nodes of
its running attempt.

Nothing in it changes with a token or grows with the prompt, which the nodes have: it has at most the few last tokens on
which the text depends. It is JSON with a version; a record that is not valid counts as missing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from baton.messages.adapters import is_adapter_digest
from baton.messages.generation import ModelCard
from baton.messages.ids import AttemptKey
from baton.messages.request_limits import MAX_IMAGE_SPANS, MAX_IMAGES, MAX_SPANS
from baton.text.detokenizer import WindowDetokenizer
from router.admission.request import ValidRequest
from router.placement.placement import Origin

MAX_TRACEPARENT = 64
_VERSION: Literal[2] = 2


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The latest attempt of one flight."""

    request: ValidRequest
    """Without its prompt, which its nodes have, so that a record is small however long the prompt is."""
    flight_id: Annotated[int, Field(ge=0, lt=2**64)]
    attempt: Annotated[int, Field(ge=1, lt=2**31)]
    prefill: str
    """Incarnation of the node that computes the prompt; empty: the decode node does."""
    decode: str
    num_given: Annotated[int, Field(ge=0)]
    """Number of output tokens that its nodes were given with the prompt, whose log-probabilities they do not know."""
    router: str
    """Incarnation of the router that wrote it."""
    written_at: float
    """Wall-clock time in seconds, for people who read the record."""
    traceparent: Annotated[str, Field(max_length=MAX_TRACEPARENT)] = ""
    """The parent of all spans of the request; empty: the request is not traced."""
    origin: Origin | None = None
    """Which nodes may continue what the nodes of the attempt have sent; None: not known."""
    takeover: Annotated[int, Field(ge=1, lt=2**32)] = 1
    """The number of the client's call that the writing router serves; see `baton.messages.node.Adopt`."""
    version: Literal[2] = _VERSION

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request.request_id, self.attempt, self.flight_id)

    def to_json(self) -> bytes:
        """The record as it is stored; `read_record` reads it."""
        # Routers that do not know the field write records without it, and read no record with it.
        without = None if self.request.context_tokens else {"request": {"context_tokens"}}
        return _ADAPTER.dump_json(self, exclude=without)


_ADAPTER = TypeAdapter(FlightRecord)


def read_record(data: bytes, request_id: str, card: ModelCard) -> FlightRecord | None:
    """The record of this request, or None for data that a router of this version and this model can't have written."""
    try:
        record = _ADAPTER.validate_json(data)
    except ValidationError:
        return None
    if _keys(json.loads(data)) != _keys(json.loads(record.to_json())):
        # Written by another version of the router: a field that this version does not know may matter.
        return None
    request = record.request
    params = request.sampling_params
    fits = (
        request.request_id == request_id
        and request.model == card.name
        and not request.prompt_token_ids
        and request.prompt_length >= 1
        and params.max_tokens >= 1
        and request.prompt_length + params.max_tokens <= card.max_model_len
        and 1 <= request.num_returned <= params.n
        and (not request.adapter or is_adapter_digest(request.adapter))
        and len(request.spans) <= MAX_SPANS + MAX_IMAGE_SPANS
        and len(request.contents) <= MAX_IMAGES
        and len(request.context_tokens) <= WindowDetokenizer.CONTEXT_TOKENS
        and all(0 <= token < card.vocab_size for token in request.context_tokens)
    )
    if not fits:
        return None
    read = replace(
        request,
        prompt_token_ids=(),
        stop=tuple(request.stop),
        shown_tokens=tuple(request.shown_tokens),
        context_tokens=tuple(request.context_tokens),
        spans=tuple([span.without_rows() for span in request.spans]),
        contents=tuple([content.without_data() for content in request.contents]),
    )
    return replace(record, request=read)


def _keys(value: Any) -> Any:
    return {key: _keys(inner) for key, inner in value.items()} if isinstance(value, dict) else None

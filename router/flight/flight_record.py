"""What another router has to know of a flight to go on with it: the request but for its prompt, and where its running
attempt is.

Nothing in it changes with a token or grows with the prompt, which the nodes have. It is JSON with a version; a record
that is not as it should be is as good as none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from baton.messages.generation import ModelCard
from baton.messages.ids import AttemptKey
from router.admission.request import ValidRequest

MAX_TRACEPARENT = 64
_VERSION: Literal[2] = 2


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """One flight's latest attempt."""

    request: ValidRequest
    """Without its prompt, which its nodes have: a record is small, and read in no time, however long that is."""
    flight_id: Annotated[int, Field(ge=0, lt=2**64)]
    attempt: Annotated[int, Field(ge=1, lt=2**31)]
    prefill: str
    """Incarnation of the node that computes the prompt; empty: the next one does it all."""
    decode: str
    num_given: Annotated[int, Field(ge=0)]
    """Tokens that its nodes were given with the prompt: they know no log-probabilities of those."""
    router: str
    """Incarnation of the router that wrote it."""
    written_at: float
    """Wall clock, seconds; for people."""
    traceparent: Annotated[str, Field(max_length=MAX_TRACEPARENT)] = ""
    """What spans of it are children of; empty: it is not traced."""
    takeover: Annotated[int, Field(ge=1, lt=2**32)] = 1
    """The number of the router that wrote it; see `baton.messages.node.Adopt`."""
    version: Literal[2] = _VERSION

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request.request_id, self.attempt, self.flight_id)

    def to_json(self) -> bytes:
        """What is kept; `read_record` reads it back."""
        return _ADAPTER.dump_json(self)


_ADAPTER = TypeAdapter(FlightRecord)


def read_record(data: bytes, request_id: str, card: ModelCard) -> FlightRecord | None:
    """The record of this request, or None for anything that this cluster could not have written."""
    try:
        record = _ADAPTER.validate_json(data)
    except ValidationError:
        return None
    if _keys(json.loads(data)) != _keys(json.loads(record.to_json())):
        # Of another version of the router: what this one does not know may matter.
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
    )
    return replace(record, request=replace(request, prompt_token_ids=(), stop=tuple(request.stop))) if fits else None


def _keys(value: Any) -> Any:
    return {key: _keys(inner) for key, inner in value.items()} if isinstance(value, dict) else None

"""The record of a flight, with which another router can continue it: the request without its prompt, and the nodes of
its running attempt.

Nothing in it changes with a token or grows with the prompt, which the nodes have: it has at most the few last tokens on
which the text depends. It is JSON with a version; a record that is not valid counts as missing.

The journal writes and reads these records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from baton.messages.adapters import is_adapter_digest
from baton.messages.generation import ModelCard
from baton.messages.ids import AttemptKey
from baton.messages.node import NodeDescription
from baton.messages.request_limits import MAX_IMAGE_SPANS, MAX_IMAGES, MAX_SPANS
from baton.registry.base import FlightRecords
from baton.text.detokenizer import WindowDetokenizer
from router.admission.request import ValidRequest
from router.flight.event_queue import FairQueue
from router.placement.placement import Origin, Placement
from router.placement.reasons import ADOPTED_FROM_RECORD

MAX_TRACEPARENT = 64
MAX_KV_BITS = 64
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
    kv_bits: Annotated[str, Field(max_length=MAX_KV_BITS)] = ""
    """See `Submit.kv_bits` of the leg of `decode`."""
    takeover: Annotated[int, Field(ge=1, lt=2**32)] = 1
    """The number of the client's call that the writing router serves; see `baton.messages.node.Adopt`."""
    version: Literal[2] = _VERSION

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request.request_id, self.attempt, self.flight_id)

    def to_json(self) -> bytes:
        """The record as it is stored; `read_record` reads it."""
        # Routers that do not know a field write records without it, and read no record with it.
        without: dict[str, Any] = {} if self.request.context_tokens else {"request": {"context_tokens"}}
        if not self.kv_bits:
            without["kv_bits"] = True
        if self.origin is not None and not self.origin.family:
            without["origin"] = {"family"} if self.origin.is_mixed else {"family", "is_mixed"}
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


READS_PER_TURN = 16
"""Records that are parsed in one turn of the event loop; each takes a fraction of a millisecond, as adopting does."""


class FlightJournal:
    """Writes one record for each flight, again with each attempt; nothing is written for a token."""

    def __init__(self, records: FlightRecords, router: str, wall: Callable[[], float]) -> None:
        """`router`: this router's incarnation; `wall`: returns the wall-clock time in seconds."""
        self._records = records
        self._turns = FairQueue(READS_PER_TURN)
        self._router = router
        self._wall = wall

    def write(
        self,
        request: ValidRequest,
        key: AttemptKey,
        placement: Placement,
        num_given: int = 0,
        traceparent: str = "",
        takeover: int = 1,
        owner: int = 0,
        origin: Origin | None = None,
    ) -> None:
        """Record that an attempt begins on these nodes, or is adopted there.

        `num_given`: how many output tokens the nodes were given with the prompt. `owner`: the id of the flight that has
        the attempt now; `takeover`: that flight's number (see `baton.messages.node.Adopt`). `origin`: of what these
        nodes send, if it is not theirs.
        """
        record = FlightRecord(
            request=request.without_prompt(),
            flight_id=key.flight,
            attempt=key.attempt,
            prefill=placement.prefill.incarnation if placement.prefill else "",
            decode=placement.decode.incarnation,
            num_given=num_given,
            router=self._router,
            written_at=self._wall(),
            # A longer one is not valid.
            traceparent=traceparent if len(traceparent) <= MAX_TRACEPARENT else "",
            origin=origin or Origin.of(placement.decode),
            kv_bits=placement.kv_bits,
            takeover=takeover,
        )
        self._records.put(request.request_id, record.to_json(), owner)

    def delete(self, request_id: str, owner: int = 0) -> None:
        """Delete the record of a flight that has ended here, and runs at no other router.

        A record that another flight of the request has written is not touched.
        """
        self._records.expire_soon(request_id, owner)

    async def find(self, request_id: str, card: ModelCard) -> FlightRecord | None:
        """The record of a request, whichever router wrote it; None if there is none, or Redis does not answer.

        A thousand clients of a dead router may come at once, so READS_PER_TURN records are parsed in one turn of the
        event loop. What the caller does with its record before it waits again belongs to the same turn.
        """
        data = await self._records.get(request_id)
        if data is None:
            return None
        await self._turns.wait()
        return read_record(data, request_id, card)


def placement_in_record(
    record: FlightRecord, positions: Sequence[int], attached: Mapping[str, NodeDescription]
) -> Placement | None:
    """The nodes of the record's attempt; None if they can't give the client everything that it lacks.

    If only the prefill node is gone, the decode node is asked alone: it knows whether it still needs the other one.
    """
    decode = attached.get(record.decode)
    if decode is None:
        return None
    wants_logprobs = record.request.sampling_params.logprobs is not None
    if wants_logprobs and min(positions, default=0) < record.num_given:
        return None
    return Placement(attached.get(record.prefill), decode, ADOPTED_FROM_RECORD, kv_bits=record.kv_bits)

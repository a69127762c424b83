"""The journal of flights: the records with which another router can continue a flight, written and read."""

from __future__ import annotations

from collections.abc import Callable

from baton.messages.generation import ModelCard
from baton.messages.ids import AttemptKey
from baton.registry.base import FlightRecords
from router.admission.request import ValidRequest
from router.flight.fair_queue import FairQueue
from router.flight.flight_record import MAX_TRACEPARENT, FlightRecord, read_record
from router.placement.placement import Origin, Placement

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
    ) -> None:
        """Record that an attempt begins on these nodes, or is adopted there.

        `num_given`: how many output tokens the nodes were given with the prompt. `owner`: the id of the flight that has
        the attempt now; `takeover`: that flight's number (see `baton.messages.node.Adopt`).
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
            origin=Origin.of(placement.decode),
            takeover=takeover,
        )
        self._records.put(request.request_id, record.to_json(), owner)

    def delete(self, request_id: str, owner: int = 0) -> None:
        """Delete the record of a flight that has ended here, and runs at no other router.

        A record that another flight of the request has written is not touched.
        """
        self._records.end(request_id, owner)

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

"""Where a router leaves what another one needs to go on with its flights, and finds what others left."""

from __future__ import annotations

from collections.abc import Callable

from baton.messages.generation import ModelCard
from baton.messages.ids import AttemptKey
from baton.registry.flights import FlightRecords
from router.admission.request import ValidRequest
from router.flight.fair_queue import FairQueue
from router.flight.flight_record import MAX_TRACEPARENT, FlightRecord, read_record
from router.placement.placement import Placement

READS_PER_TURN = 16
"""Each takes a fraction of a millisecond to read, and about as long to adopt."""


class FlightJournal:
    """One record a flight, rewritten with each attempt; nothing is written for a token."""

    def __init__(self, records: FlightRecords, router: str, wall: Callable[[], float]) -> None:
        """`router` is this router's incarnation, `wall` the time of the day in seconds."""
        self._records = records
        self._turns = FairQueue(READS_PER_TURN)
        self._router = router
        self._wall = wall

    def placed(
        self,
        request: ValidRequest,
        key: AttemptKey,
        placement: Placement,
        num_given: int = 0,
        traceparent: str = "",
        takeover: int = 1,
        owner: int = 0,
    ) -> None:
        """An attempt begins on these nodes, which were given so many tokens of the output, or is adopted there.

        `owner`: the flight that has it now; `takeover`: that one's number (see `baton.messages.node.Adopt`).
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
            # One that is longer is none.
            traceparent=traceparent if len(traceparent) <= MAX_TRACEPARENT else "",
            takeover=takeover,
        )
        self._records.put(request.request_id, record.to_json(), owner)

    def ended(self, request_id: str, owner: int = 0) -> None:
        """The flight is over here, and at no other router. What another flight left of the request is not touched."""
        self._records.end(request_id, owner)

    async def find(self, request_id: str, card: ModelCard) -> FlightRecord | None:
        """What some router left of the request; None where nobody knows it, or can be asked.

        A thousand clients of a dead router come at once: only so many records are read in one turn of the loop. What
        the caller does with its own before it waits belongs to the same turn.
        """
        data = await self._records.get(request_id)
        if data is None:
            return None
        await self._turns.wait()
        return read_record(data, request_id, card)

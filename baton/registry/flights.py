"""Records of running requests, from which another router can take a request over.

A record is a request id and bytes that only routers interpret. Writing never waits and never raises: a write that fails
is repeated while there is room in the queue, and counted as lost otherwise. A request without a record runs as any
other, but its client has to send it again when its router is lost.
"""

from __future__ import annotations

from typing import Protocol

ENDED_S = 60.0
"""Seconds that the record of a finished request is kept, since its client may have missed the end of the stream."""
MAX_RECORD_BYTES = 256 << 10
"""Larger records are not kept. The largest part of a record is a grammar."""


class FlightRecords(Protocol):
    """The records of one cluster. All calls come from one event loop."""

    @property
    def num_lost(self) -> int:
        """The number of records that could not be written, since the start of the process."""
        ...

    def put(self, request_id: str, record: bytes, owner: int = 0) -> None:
        """Store this record in place of any other for the request. It expires when it was not stored again for the
        lifetime of the records, the setting `flight_record_s`.

        `owner`: the number of the flight (64 bits), since several flights may have the same request id.
        """
        ...

    def end(self, request_id: str, owner: int = 0) -> None:
        """Let the record of a finished flight expire soon, unless it has been replaced by another flight's."""
        ...

    async def get(self, request_id: str) -> bytes | None:
        """The record; None if there is none or the store can't be reached."""
        ...

    async def close(self) -> None:
        """Try once to write what is queued, then disconnect. Idempotent."""
        ...

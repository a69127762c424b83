"""Records of running requests, from which another router can take a request over: the interface and its fake.

A record is a request id and bytes that only routers interpret. Writing never waits and never raises: a write that fails
is repeated while there is room in the queue, and counted as lost otherwise. A request without a record runs as any
other, but its client has to send it again when its router is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ENDED_S = 60.0
"""Seconds that the record of a finished request is kept, since its client may have missed the end of the stream."""
LIFETIME_S = 3600.0
MAX_RECORD_BYTES = 256 << 10
"""Larger records are not kept. The largest part of a record is a grammar."""


class FlightRecords(Protocol):
    """The records of one cluster. All calls come from one event loop."""

    @property
    def num_lost(self) -> int:
        """The number of records that could not be written, since the start of the process."""
        ...

    def put(self, request_id: str, record: bytes, owner: int = 0) -> None:
        """Store this record in place of any other for the request. It expires after the records' lifetime.

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


@dataclass(slots=True)
class _Kept:
    record: bytes
    lifetime_s: float
    owner: int


class MemoryFlightStore:
    """The store that all `MemoryFlightRecords` of a test share. Its records do not expire by themselves."""

    def __init__(self) -> None:
        self.up = True
        self.kept: dict[tuple[str, str], _Kept] = {}

    def lifetime_s(self, cluster: str, request_id: str) -> float | None:
        """The lifetime that was last set for the record, in seconds; None if there is no record."""
        found = self.kept.get((cluster, request_id))
        return None if found is None else found.lifetime_s


class MemoryFlightRecords:
    """One process's access to a `MemoryFlightStore`; see `FlightRecords`."""

    def __init__(self, store: MemoryFlightStore, cluster: str, *, lifetime_s: float = LIFETIME_S) -> None:
        self._store = store
        self._cluster = cluster
        self._lifetime_s = lifetime_s
        self._num_lost = 0

    @property
    def num_lost(self) -> int:
        return self._num_lost

    def put(self, request_id: str, record: bytes, owner: int = 0) -> None:
        if len(record) > MAX_RECORD_BYTES or not self._store.up:
            self._num_lost += 1
            return
        self._store.kept[self._cluster, request_id] = _Kept(record, self._lifetime_s, owner)

    def end(self, request_id: str, owner: int = 0) -> None:
        found = self._store.kept.get((self._cluster, request_id))
        if found is not None and found.owner == owner and self._store.up:
            found.lifetime_s = min(found.lifetime_s, ENDED_S)

    async def get(self, request_id: str) -> bytes | None:
        found = self._store.kept.get((self._cluster, request_id))
        return found.record if found is not None and self._store.up else None

    async def close(self) -> None:
        return

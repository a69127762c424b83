"""Records of requests under way, so that another router can take one over. The interface, and its in-process fake.

A record is bytes under a request id; what they mean is the routers' affair. Writing never waits and never fails: what
can't be written is tried again while there is room, then counted. A request without a record is none the worse, it only
has to be asked for again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ENDED_S = 60.0
"""How long the record of a request that is over is kept: its client may have missed the end."""
LIFETIME_S = 3600.0
MAX_RECORD_BYTES = 256 << 10
"""A larger one is not kept; a grammar is the largest thing in one."""


class FlightRecords(Protocol):
    """The records of one cluster. Belongs to one event loop."""

    @property
    def num_lost(self) -> int:
        """Writes that were given up since start."""
        ...

    def put(self, request_id: str, record: bytes, owner: int = 0) -> None:
        """Keep this record from now on, in place of any other; it expires after the records' lifetime.

        `owner` (64 bits): the flight that it is of, since several may have the same request id.
        """
        ...

    def end(self, request_id: str, owner: int = 0) -> None:
        """This flight is over: the record expires soon, unless it is another flight's."""
        ...

    async def get(self, request_id: str) -> bytes | None:
        """The record, or None where there is none or nobody can be asked."""
        ...

    async def close(self) -> None:
        """Write what is left, as far as that works at once. Idempotent."""
        ...


@dataclass(slots=True)
class _Kept:
    record: bytes
    lifetime_s: float
    owner: int


class MemoryFlightStore:
    """The server that every `MemoryFlightRecords` of a test shares. Nothing in it expires by itself."""

    def __init__(self) -> None:
        self.up = True
        self.kept: dict[tuple[str, str], _Kept] = {}

    def lifetime_s(self, cluster: str, request_id: str) -> float | None:
        """How long the record was to be kept when it was last touched; None where there is none."""
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

"""The fake of `baton.registry.base.FlightRecords`, and the store behind it."""

from __future__ import annotations

from dataclasses import dataclass

from baton.registry.base import ENDED_S, MAX_RECORD_BYTES

LIFETIME_S = 10 * ENDED_S
"""The lifetime of a running request's record in tests that do not choose one."""


@dataclass(slots=True)
class _Kept:
    record: bytes
    lifetime_s: float
    owner: int


class FakeFlightStore:
    """The store that all `FakeFlightRecords` of a test share. Its records do not expire by themselves."""

    def __init__(self) -> None:
        self.up = True
        self.kept: dict[tuple[str, str], _Kept] = {}

    def lifetime_s(self, cluster: str, request_id: str) -> float | None:
        """The lifetime that was last set for the record, in seconds; None if there is no record."""
        found = self.kept.get((cluster, request_id))
        return None if found is None else found.lifetime_s


class FakeFlightRecords:
    """One process's access to a `FakeFlightStore`; see `FlightRecords`."""

    def __init__(self, store: FakeFlightStore, cluster: str, *, lifetime_s: float = LIFETIME_S) -> None:
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

    def expire_soon(self, request_id: str, owner: int = 0) -> None:
        found = self._store.kept.get((self._cluster, request_id))
        if found is not None and found.owner == owner and self._store.up:
            found.lifetime_s = min(found.lifetime_s, ENDED_S)

    async def get(self, request_id: str) -> bytes | None:
        found = self._store.kept.get((self._cluster, request_id))
        return found.record if found is not None and self._store.up else None

    async def close(self) -> None:
        return

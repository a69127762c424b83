"""The interfaces of the registry, which this folder implements in Redis and `tests.doubles` in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from baton.errors import ConfigError, Unreachable
from baton.registry.desired import DesiredChange, DesiredState
from baton.registry.records import NodeRecord, Snapshot

ENDED_S = 60.0
"""Seconds that the record of a finished request is kept, since its client may have missed the end of the stream."""
MAX_RECORD_BYTES = 256 << 10
"""Larger records are not kept. The largest part of a record is a grammar."""


LEAD_S = 10.0
"""A leader that has not confirmed that it leads for so many seconds leads no more."""


class Term(NamedTuple):
    """The time for which one process leads."""

    number: int
    """Larger than those of all terms before, as long as the registry keeps its data."""
    incarnation: str


class Lease(Protocol):
    """A published record that is kept alive in the background until it is closed."""

    @property
    def record(self) -> NodeRecord: ...

    async def update(self, record: NodeRecord) -> None:
        """Publish another record of the same incarnation; raises ValueError for another incarnation.

        While the registry is unreachable the record waits, and is published when the registry is back.
        """
        ...

    async def close(self) -> None:
        """Stop renewing and delete the record, if the registry can be reached. Idempotent."""
        ...


class Membership(Protocol):
    """One process's view of the registry of its cluster. All calls come from one event loop."""

    @property
    def cluster(self) -> str: ...

    @property
    def healthy(self) -> bool:
        """Whether the last contact with the registry worked. False before the first."""
        ...

    @property
    def bad_records(self) -> int:
        """The number of unusable records in the latest full read, which were skipped."""
        ...

    async def ping(self) -> None:
        """Make one round trip. Raises Unreachable with the address and the reason."""
        ...

    async def read(self) -> Snapshot:
        """Read all records. Raises Unreachable. The snapshot is immutable."""
        ...

    async def lease(self, record: NodeRecord) -> Lease:
        """Publish the record and renew it until the lease is closed; after a crash it expires within `record.lease_s`.

        The call returns after the first attempt to publish, successful or not. Further attempts are made in the
        background, also when the registry has lost its data.
        """
        ...

    def watch(self) -> AsyncIterator[Snapshot]:
        """Yield the current snapshot and each later one, until the registry is closed.

        A slow consumer misses snapshots in between, never the newest. While the registry is unreachable the last
        snapshot remains valid. After the registry lost its data, missing records remain valid until their processes
        have had time to publish them again.
        """
        ...

    async def namesakes(self, name: str) -> Sequence[NodeRecord]:
        """The records of all incarnations of this name, the earliest first. Raises Unreachable."""
        ...

    async def next_start(self, name: str) -> int:
        """A number for a process of this name that starts now, larger than those of its earlier incarnations.

        See `NodeRecord.start_number`. Raises Unreachable.
        """
        ...

    async def retract(self, record: NodeRecord) -> None:
        """Delete the record of a process that is known to have ended. Raises Unreachable.

        If the process is alive after all, its lease writes the record again.
        """
        ...

    async def desired(self) -> DesiredState:
        """Read what operators want. Raises Unreachable."""
        ...

    async def want(self, change: DesiredChange, term: Term | None = None) -> None:
        """Change what operators want, atomically. Raises Unreachable, after which the change may still take effect.

        `term`: that of the leader who wants it; raises NotLeader, and changes nothing, if it has ended.
        """
        ...

    async def lead(self, incarnation: str) -> Term | None:
        """Become or stay the one router that plans moves, for LEAD_S from now. None: another one is.

        Raises Unreachable.
        """
        ...

    async def resign(self, term: Term) -> None:
        """End a term, so that another router may lead at once. Idempotent. Raises Unreachable."""
        ...

    def watch_desired(self) -> AsyncIterator[DesiredState]:
        """Yield what operators want now and after each change, as `watch` does.

        While the registry is unreachable the last state remains valid. A watcher writes it back to a registry that has
        lost its data.
        """
        ...

    async def exchange_totals(self, incarnation: str, data: bytes, others: Sequence[str]) -> Mapping[str, bytes]:
        """Publish what a router has counted, for some seconds, and read what others published, by incarnation.

        Those that published nothing lately are left out. Raises Unreachable.
        """
        ...

    async def close(self) -> None:
        """Close every lease and watch. Idempotent."""
        ...


async def require(membership: Membership) -> None:
    """Check that the registry answers, before a process starts. Raises ConfigError if it does not."""
    try:
        await membership.ping()
    except Unreachable as error:
        raise ConfigError(f"{error}; start Redis there, or name another one with --registry") from None


class FlightRecords(Protocol):
    """The records of one cluster's running requests, from which another router can take them over.

    A record is a request id and bytes that only routers interpret. Writing never waits and never raises: a write that
    fails is repeated while there is room in the queue, and counted as lost otherwise. A request without a record runs
    as any other, but its client has to send it again when its router is lost. All calls come from one event loop.
    """

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

    def expire_soon(self, request_id: str, owner: int = 0) -> None:
        """Let the record of an ended flight expire soon, unless it has been replaced by another flight's."""
        ...

    async def get(self, request_id: str) -> bytes | None:
        """The record; None if there is none or the store can't be reached."""
        ...

    async def close(self) -> None:
        """Try once to write what is queued, then disconnect. Idempotent."""
        ...

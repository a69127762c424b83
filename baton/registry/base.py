"""Membership: who is in the cluster. The one interface over Redis (`registry`) and its in-process fake (`memory`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from baton.errors import ConfigError, Unreachable
from baton.registry.desired import DesiredChange, DesiredState
from baton.registry.records import NodeRecord, Snapshot


class Lease(Protocol):
    """A published record that is kept alive in the background until it is closed."""

    @property
    def record(self) -> NodeRecord: ...

    async def update(self, record: NodeRecord) -> None:
        """Publish another record of the same incarnation; raises ValueError for another incarnation.

        With the registry gone it is published as soon as the registry is back.
        """
        ...

    async def close(self) -> None:
        """Stop renewing and take the record back, as far as the registry can be reached. Idempotent."""
        ...


class Membership(Protocol):
    """The registry of one cluster, as one process sees it. Belongs to one event loop."""

    @property
    def cluster(self) -> str: ...

    @property
    def healthy(self) -> bool:
        """Whether the last contact with the registry worked. False before the first."""
        ...

    @property
    def bad_records(self) -> int:
        """How many records of the latest full read had to be skipped."""
        ...

    async def ping(self) -> None:
        """One round trip; raises Unreachable with the address and the reason."""
        ...

    async def read(self) -> Snapshot:
        """One full read, now; raises Unreachable. The snapshot is immutable."""
        ...

    async def lease(self, record: NodeRecord) -> Lease:
        """Publish the record and keep it for as long as the lease is open, `record.lease_s` beyond a crash.

        Returns after the first try, whether it worked or not: an unreachable registry is tried again in the background,
        and one that came back empty gets the record again.
        """
        ...

    def watch(self) -> AsyncIterator[Snapshot]:
        """Every snapshot from now on, the current one first; ends when the registry is closed.

        Snapshots that nobody took in time are skipped, the newest one never. With the registry gone the last snapshot
        stands; after an outage or a flush, records that are missing stand until their processes had time to renew them.
        """
        ...

    async def namesakes(self, name: str) -> Sequence[NodeRecord]:
        """Every incarnation of this name that is in the registry now, the earliest first; raises Unreachable."""
        ...

    async def next_start(self, name: str) -> int:
        """The number of a start of this name: larger than that of each of its earlier incarnations. Raises Unreachable.

        See `NodeRecord.start_number`.
        """
        ...

    async def retract(self, record: NodeRecord) -> None:
        """Take back the record of a process that is known to be gone; raises Unreachable.

        Should it live after all, its lease writes the record again.
        """
        ...

    async def desired(self) -> DesiredState:
        """What operators want, read now; raises Unreachable."""
        ...

    async def want(self, change: DesiredChange) -> None:
        """Change what operators want, all of it or nothing; raises Unreachable, and then it may still come about."""
        ...

    def watch_desired(self) -> AsyncIterator[DesiredState]:
        """Everything that operators want, from now on, as `watch`. With the registry gone the last word stands.

        Whoever watches gives it back to a registry that came back empty.
        """
        ...

    async def close(self) -> None:
        """Close every lease and watch. Idempotent."""
        ...


async def require(membership: Membership) -> None:
    """For processes that are about to start; raises ConfigError when the registry does not answer."""
    try:
        await membership.ping()
    except Unreachable as error:
        raise ConfigError(f"{error}; start Redis there, or name another one with --registry") from None

"""The fake of the registry in Redis: an in-process registry with the same contract.

One `FakeRegistryStore` is the server; any number of `FakeRegistry` are its clients. The store can be stopped, restarted
with or without its records, and given the records of another program.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from baton.clock import Clock, SystemClock
from baton.errors import NotLeader, Unreachable
from baton.registry.base import LEAD_S, Term
from baton.registry.desired import DesiredChange, DesiredMemory, DesiredState
from baton.registry.feed import Feed
from baton.registry.records import NodeRecord, OutageGrace, Snapshot, incarnations_of, number_of_start, read_records


@dataclass(slots=True)
class _Entry:
    data: bytes
    expiry: asyncio.TimerHandle | None = None


class FakeRegistryStore:
    """The server that all `FakeRegistry` of a test share. Expiry runs on the event loop's clock."""

    def __init__(self) -> None:
        self.up = True
        self._epochs = 0
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._desired: dict[str, DesiredState] = {}
        self._starts: dict[str, int] = {}
        self._totals: dict[str, dict[str, bytes]] = {}
        self._terms: dict[str, tuple[Term, float]] = {}
        """The last term of each cluster, and until when it lasts."""
        self._num_terms = 0
        self._clients: set[FakeRegistry] = set()

    @property
    def epoch(self) -> str:
        """The registry's epoch, which changes when the store loses its data."""
        return f"epoch-{self._epochs}"

    def stop(self) -> None:
        """Stop answering, as a killed server does."""
        self.up = False
        self._notify_clients()

    def restart(self, *, empty: bool) -> None:
        """Answer again, with the records from before the stop, or without any if `empty`."""
        if empty:
            for entry in self._entries.values():
                if entry.expiry is not None:
                    entry.expiry.cancel()
            self._entries.clear()
            self._desired.clear()
            self._starts.clear()
            self._totals.clear()
            self._terms.clear()
            self._epochs += 1
        self.up = True
        self._notify_clients()

    def put(self, cluster: str, incarnation: str, data: bytes, lifetime_s: float | None = None) -> None:
        """Store raw bytes as a record."""
        self.remove(cluster, incarnation)
        entry = _Entry(data)
        if lifetime_s is not None:
            loop = asyncio.get_running_loop()
            entry.expiry = loop.call_later(lifetime_s, self.remove, cluster, incarnation)
        self._entries[cluster, incarnation] = entry
        self._notify_clients()

    def remove(self, cluster: str, incarnation: str) -> None:
        """Delete a record, if there is one."""
        entry = self._entries.pop((cluster, incarnation), None)
        if entry is not None:
            if entry.expiry is not None:
                entry.expiry.cancel()
            self._notify_clients()

    def stored(self, cluster: str) -> list[tuple[str, bytes]]:
        """All records of a cluster, each with its incarnation."""
        return [(incarnation, entry.data) for (owner, incarnation), entry in self._entries.items() if owner == cluster]

    def desired(self, cluster: str) -> DesiredState:
        """What operators want of a cluster."""
        return self._desired.get(cluster, DesiredState())

    def want(self, cluster: str, change: DesiredChange) -> None:
        """Change what operators want of a cluster."""
        self._desired[cluster] = change.applied_to(self.desired(cluster))
        self._notify_clients()

    def count_start(self, cluster: str) -> int:
        """Count the start of a process. Returns the number of starts so far."""
        self._starts[cluster] = self._starts.get(cluster, 0) + 1
        return self._starts[cluster]

    def totals(self, cluster: str) -> dict[str, bytes]:
        """The totals of the routers of a cluster, by incarnation. They do not expire here."""
        return self._totals.setdefault(cluster, {})

    def term(self, cluster: str) -> Term | None:
        """The term that lasts."""
        term, until = self._terms.get(cluster, (None, 0.0))
        return term if asyncio.get_running_loop().time() < until else None

    def lead(self, cluster: str, incarnation: str) -> Term | None:
        """Begin or extend a term; see `Membership.lead`."""
        term = self.term(cluster)
        if term is None:
            self._num_terms += 1
            term = Term(self._num_terms, incarnation)
        if term.incarnation != incarnation:
            return None
        self._terms[cluster] = term, asyncio.get_running_loop().time() + LEAD_S
        return term

    def resign(self, cluster: str, term: Term) -> None:
        """End a term, if it lasts."""
        if self.term(cluster) == term:
            del self._terms[cluster]

    def attach(self, client: FakeRegistry) -> None:
        """Notify this client of every change from now on."""
        self._clients.add(client)

    def detach(self, client: FakeRegistry) -> None:
        """Stop notifying this client."""
        self._clients.discard(client)

    def _notify_clients(self) -> None:
        for client in list(self._clients):
            client.notice()


class FakeRegistry:
    """One process's client of a `FakeRegistryStore`; see `baton.registry.base.Membership`."""

    def __init__(self, store: FakeRegistryStore, cluster: str, *, clock: Clock | None = None) -> None:
        self._store = store
        self._cluster = cluster
        self._clock = clock or SystemClock()
        self._feed = Feed[Snapshot]()
        self._desired_feed = Feed[DesiredState]()
        self._grace = OutageGrace()
        self._memory = DesiredMemory()
        self._bad_records = 0
        self._watched = False
        self._healthy = False
        self._leases: dict[str, FakeLease] = {}
        self._regrant: asyncio.Handle | None = None
        store.attach(self)

    @property
    def cluster(self) -> str:
        return self._cluster

    @property
    def healthy(self) -> bool:
        return self._healthy

    @property
    def bad_records(self) -> int:
        return self._bad_records

    async def ping(self) -> None:
        """Raises Unreachable while the store is stopped."""
        self._healthy = self._store.up
        if not self._store.up:
            raise Unreachable("registry memory:// does not answer: stopped")

    async def read(self) -> Snapshot:
        """Read all records. Raises Unreachable."""
        await self.ping()
        return read_records(self._store.stored(self._cluster)).snapshot

    async def lease(self, record: NodeRecord) -> FakeLease:
        """Publish the record and keep it; see `Membership.lease`."""
        lease = FakeLease(self, record)
        self._leases[record.incarnation] = lease
        self.publish(record)
        return lease

    async def watch(self) -> AsyncIterator[Snapshot]:
        """Yield the current and all later snapshots; see `Membership.watch`."""
        self._watched = True
        self.notice()
        async for snapshot in self._feed.watch():
            yield snapshot

    async def namesakes(self, name: str) -> Sequence[NodeRecord]:
        """The records of all incarnations of a name; see `Membership.namesakes`."""
        await self.ping()
        return incarnations_of(name, self._store.stored(self._cluster))

    async def next_start(self, name: str) -> int:
        """A number for a process that starts now; see `Membership.next_start`."""
        return number_of_start(self._store.count_start(self._cluster), await self.namesakes(name))

    async def retract(self, record: NodeRecord) -> None:
        """Delete the record of a process that has ended; see `Membership.retract`."""
        await self.ping()
        self._store.remove(self._cluster, record.incarnation)

    async def desired(self) -> DesiredState:
        """Read what operators want. Raises Unreachable."""
        await self.ping()
        return self._store.desired(self._cluster)

    async def want(self, change: DesiredChange, term: Term | None = None) -> None:
        """Change what operators want; see `Membership.want`."""
        await self.ping()
        if term is not None and self._store.term(self._cluster) != term:
            raise NotLeader(f"the term {term.number} of {term.incarnation} has ended")
        self._store.want(self._cluster, change)

    async def lead(self, incarnation: str) -> Term | None:
        """Become or stay the router that plans moves; see `Membership.lead`."""
        await self.ping()
        return self._store.lead(self._cluster, incarnation)

    async def resign(self, term: Term) -> None:
        """End a term; see `Membership.resign`."""
        await self.ping()
        self._store.resign(self._cluster, term)

    async def watch_desired(self) -> AsyncIterator[DesiredState]:
        """Yield what operators want now and after each change; see `Membership.watch_desired`."""
        self._watched = True
        self.notice()
        async for desired in self._desired_feed.watch():
            yield desired

    async def exchange_totals(self, incarnation: str, data: bytes, others: Sequence[str]) -> Mapping[str, bytes]:
        """Publish a router's totals and read those of others; see `Membership.exchange_totals`."""
        await self.ping()
        published = self._store.totals(self._cluster)
        published[incarnation] = data
        return {name: published[name] for name in others if name in published}

    async def close(self) -> None:
        """Close every lease and watch. Idempotent."""
        self._feed.close()
        self._desired_feed.close()
        for lease in list(self._leases.values()):
            await lease.close()
        if self._regrant is not None:
            self._regrant.cancel()
        self._store.detach(self)

    def publish(self, record: NodeRecord) -> None:
        """Write a record that does not expire, if the store is up. Called by leases."""
        self._healthy = self._store.up
        if self._store.up:
            self._store.put(self._cluster, record.incarnation, record.to_json())

    def release(self, record: NodeRecord, lifetime_s: float) -> None:
        """Let a record expire after `lifetime_s` seconds; 0: delete it now. Called by leases."""
        self._leases.pop(record.incarnation, None)
        if not self._store.up:
            return
        if lifetime_s:
            self._store.put(self._cluster, record.incarnation, record.to_json(), lifetime_s)
        else:
            self._store.remove(self._cluster, record.incarnation)

    def notice(self) -> None:
        """Read the store, which has changed, and publish the leases' records that it has lost. Called by the store."""
        self._healthy = self._store.up
        if not self._store.up:
            return
        if self._watched:
            reading = read_records(self._store.stored(self._cluster))
            self._bad_records = len(reading.bad)
            self._feed.publish(self._grace.merge(self._store.epoch, reading.snapshot, self._clock.monotonic()))
            desired, lost = self._memory.merge(self._store.epoch, self._store.desired(self._cluster))
            self._desired_feed.publish(desired)
            if not lost.is_empty:
                self._store.want(self._cluster, lost)
        if self._regrant is None and self._lost():
            self._regrant = asyncio.get_running_loop().call_soon(self._publish_lost)

    def _lost(self) -> list[FakeLease]:
        stored = {incarnation for incarnation, _ in self._store.stored(self._cluster)}
        return [lease for incarnation, lease in self._leases.items() if incarnation not in stored]

    def _publish_lost(self) -> None:
        self._regrant = None
        for lease in self._lost():
            self.publish(lease.record)


class FakeLease:
    """A record in a FakeRegistryStore; see `baton.registry.base.Lease`."""

    def __init__(self, registry: FakeRegistry, record: NodeRecord) -> None:
        self._registry = registry
        self._record = record
        self._closed = False

    @property
    def record(self) -> NodeRecord:
        return self._record

    async def update(self, record: NodeRecord) -> None:
        """Publish another record of the same incarnation; see `Lease.update`."""
        if (record.name, record.incarnation) != (self._record.name, self._record.incarnation):
            raise ValueError(f"the lease of {self._record.incarnation} can't publish a record of {record.incarnation}")
        self._record = record
        self._registry.publish(record)

    async def close(self) -> None:
        """Delete the record. Idempotent."""
        if not self._closed:
            self._closed = True
            self._registry.release(self._record, 0.0)

    async def abandon(self) -> None:
        """Stop renewing but leave the record, as a killed process does."""
        self._closed = True
        self._registry.release(self._record, self._record.lease_s)

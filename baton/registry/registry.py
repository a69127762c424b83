"""The registry in Redis, version 6.2 or later. It uses no script, and no key outside `baton:CLUSTER:`.

    baton:CLUSTER:node:INCARNATION   one record as JSON; expires unless its process renews it
    baton:CLUSTER:nodes              the set of all incarnations that have published; readers remove those that are gone
    baton:CLUSTER:epoch              a random word; a different word means that Redis has lost its data
    baton:CLUSTER:starts             the counter of process starts, see `NodeRecord.start_number`
    baton:CLUSTER:reserve:N          memory held in reserve, freed when a record has to be written and Redis is full
    baton:CLUSTER:desired:STATE      the set of nodes that operators want to be cordoned, prefill or decode; or the
                                     adapters that they have given names to
    baton:CLUSTER:planner, :terms    which router plans moves, and the counter of its terms, see `redis_leader`
    baton:CLUSTER:changes            pub/sub channel; each message says that a record or the desired state changed
    baton:CLUSTER:totals:INCARNATION what a router has counted, as JSON for the live pages of all; expires
    baton:CLUSTER:flight:REQUEST     the record of one running request, see `redis_flights`
    baton:CLUSTER:quota:NAME         what is used of a quota, and
    baton:CLUSTER:running:NAME       which requests run that a quota counts, see `redis_quotas`

Records are stored per incarnation, so that no two processes write the same key and no compare-and-set is needed.

A full Redis does not end any membership. A renewal only extends the lifetime of a record, which Redis does not refuse
for lack of memory. A record that has to be written while Redis is full takes the memory of a reserve, which is
allocated again later.

A message on the channel only makes watchers read sooner: each reads everything once in `READ_EVERY_S` in any case.

An operation on a shared connection is never cancelled while its reply is outstanding, because the next user of the
connection would read that reply. Callers wait behind a shield, and the operation of a cancelled caller runs to its end
or its timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Any, TypeVar

from redis import asyncio as redis
from redis.exceptions import OutOfMemoryError, ResponseError

from baton.background import OnFault, start_background
from baton.clock import Clock, SystemClock
from baton.errors import Unreachable
from baton.messages.ids import random_token
from baton.registry.base import Term, require
from baton.registry.connection import REDIS_ERRORS, connect_redis
from baton.registry.desired import DESIRED_SETS, DesiredChange, DesiredMemory, DesiredState
from baton.registry.feed import Feed
from baton.registry.records import (
    NodeRecord,
    OutageGrace,
    Snapshot,
    incarnations_of,
    number_of_start,
    read_records,
)
from baton.registry.redis_leader import as_not_leader, lead, resign, watch_term
from baton.security.redaction import without_password

T = TypeVar("T")

READ_EVERY_S = 2.0
OPERATION_TIMEOUT_S = 3.0
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
RESERVES = 16
RESERVE_BYTES = 128 << 10
"""Size of a reserve. A record takes a tenth of it, and the connections of a new process the rest."""
_RESERVE_MS = 10 * 365 * 86_400_000
"""Lifetime of a reserve: practically unlimited. Setting it again tells whether the reserve still exists."""
_TOTALS_MS = 10_000
"""Lifetime of a router's totals, which are published more often than that."""
_RESERVES_EVERY_S = 60.0
"""Interval at which a process checks that the reserves exist."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """The result of one full read."""

    epoch: str | None
    records: Sequence[tuple[str, bytes]]
    desired: DesiredState


class Registry:
    """One process's view of one cluster's registry; see `baton.registry.base.Membership`."""

    def __init__(self, client: redis.Redis, url: str, cluster: str, *, clock: Clock, rng: Random) -> None:
        self._client = client
        self._where = without_password(url)
        self._cluster = cluster
        self._clock = clock
        self._rng = rng
        self._feed = Feed[Snapshot]()
        self._desired_feed = Feed[DesiredState]()
        self._grace = OutageGrace()
        self._memory = DesiredMemory()
        self._bad_records = 0
        self._healthy = False
        self._closed = False
        self._leases: set[RedisLease] = set()
        self._follower: asyncio.Task[None] | None = None
        self._operations: set[asyncio.Task[Any]] = set()
        self._reserves_seen_at = -_RESERVES_EVERY_S

    @classmethod
    def connect(cls, url: str, cluster: str, *, clock: Clock | None = None, rng: Random | None = None) -> Registry:
        """Make a registry for a URL with redis://, rediss:// or unix://. The first operation connects.

        Raises ConfigError for any other URL.
        """
        client = connect_redis(url, OPERATION_TIMEOUT_S)
        return cls(client, url, cluster, clock=clock or SystemClock(), rng=rng or SystemRandom())

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
        """Make one round trip. Raises Unreachable with the address and the reason."""
        await self._checked(self._ping())

    async def _ping(self) -> None:
        await self._client.ping()

    async def read(self) -> Snapshot:
        """Read all records. Raises Unreachable."""
        return read_records((await self._checked(self._read())).records).snapshot

    async def lease(self, record: NodeRecord) -> RedisLease:
        """Publish the record and renew it; see `Membership.lease`."""
        lease = RedisLease(self, record)
        self._leases.add(lease)
        await lease.publish()
        return lease

    async def watch(self) -> AsyncIterator[Snapshot]:
        """Yield the current and all later snapshots; see `Membership.watch`."""
        self._start_following()
        async for snapshot in self._feed.watch():
            yield snapshot

    async def namesakes(self, name: str) -> Sequence[NodeRecord]:
        """The records of all incarnations of a name; see `Membership.namesakes`."""
        return incarnations_of(name, (await self._checked(self._read())).records)

    async def next_start(self, name: str) -> int:
        """A number for a process that starts now; see `Membership.next_start`."""
        return await self._checked(self._next_start(name))

    async def _next_start(self, name: str) -> int:
        try:
            counted = int(await self._client.incr(self._key("starts")))
        except ResponseError:
            # Redis is full, or the ACL rules are of an older version and do not permit INCR.
            counted = 0
        return number_of_start(counted, incarnations_of(name, (await self._read()).records))

    async def desired(self) -> DesiredState:
        """Read what operators want. Raises Unreachable."""
        return (await self._checked(self._read())).desired

    async def want(self, change: DesiredChange, term: Term | None = None) -> None:
        """Change what operators want; see `Membership.want`."""
        await self._checked(self._want(change, term))

    async def lead(self, incarnation: str) -> Term | None:
        """Become or stay the router that plans moves; see `Membership.lead`."""
        return await self._checked(lead(self._client, self._key("planner"), self._key("terms"), incarnation))

    async def resign(self, term: Term) -> None:
        """End a term; see `Membership.resign`."""
        await self._checked(resign(self._client, self._key("planner"), term))

    async def watch_desired(self) -> AsyncIterator[DesiredState]:
        """Yield what operators want now and after each change; see `Membership.watch_desired`."""
        self._start_following()
        async for desired in self._desired_feed.watch():
            yield desired

    async def exchange_totals(self, incarnation: str, data: bytes, others: Sequence[str]) -> Mapping[str, bytes]:
        """Publish a router's totals and read those of others; see `Membership.exchange_totals`."""
        return await self._checked(self._exchange_totals(incarnation, data, others))

    async def _exchange_totals(self, incarnation: str, data: bytes, others: Sequence[str]) -> Mapping[str, bytes]:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.set(self._key("totals", incarnation), data, px=_TOTALS_MS)
            if others:
                pipe.mget([self._key("totals", name) for name in others])
            written, *answers = await pipe.execute(raise_on_error=False)
        # A full Redis can still be read.
        for answer in (written, *answers):
            if isinstance(answer, Exception) and not isinstance(answer, OutOfMemoryError):
                raise answer
        values = answers[0] if answers else []
        return {name: _bytes(value) for name, value in zip(others, values, strict=True) if value is not None}

    async def close(self) -> None:
        """Close all leases and watches, then the connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._feed.close()
        self._desired_feed.close()
        for lease in list(self._leases):
            await lease.close()
        if self._follower is not None:
            # The follower's connection is not shared and is closed with it, so that no other operation reads the reply
            # that it leaves behind.
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await asyncio.gather(*self._operations, return_exceptions=True)
        with contextlib.suppress(*REDIS_ERRORS):
            await self._client.aclose()

    def _start_following(self) -> None:
        if self._follower is None and not self._closed:
            self._follower = start_background(self._follow, "registry-follower", on_fault=OnFault.RESTART)

    async def _follow(self) -> None:
        failures = 0
        while True:
            pubsub = self._client.pubsub()
            try:
                await pubsub.subscribe(self._key("changes"))
                while True:
                    stored = await self._operate(self._read())
                    failures = 0
                    self._healthy = True
                    await self._publish_to_watchers(stored)
                    await pubsub.get_message(ignore_subscribe_messages=True, timeout=READ_EVERY_S)
            except REDIS_ERRORS:
                self._healthy = False
            except Exception:
                # A bug of Baton's: `start_background` reports it and starts this coroutine again.
                self._healthy = False
                raise
            finally:
                with contextlib.suppress(*REDIS_ERRORS):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]
            await asyncio.sleep(retry_delay(failures, LAST_RETRY_S))
            failures += 1

    async def _publish_to_watchers(self, stored: _Stored) -> None:
        """Give a full read to all watchers, and restore the desired state in a registry that has lost its data."""
        reading = read_records(stored.records)
        self._bad_records = len(reading.bad)
        self._feed.publish(self._grace.merge(stored.epoch, reading.snapshot, self._clock.monotonic()))
        desired, lost = self._memory.merge(stored.epoch, stored.desired)
        self._desired_feed.publish(desired)
        if not lost.is_empty:
            await self._operate(self._want(lost))

    async def _read(self) -> _Stored:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.smembers(self._key("nodes"))
            for kind in DESIRED_SETS:
                pipe.smembers(self._key("desired", kind))
            known, *wanted = await pipe.execute()
        desired = DesiredState.of(
            {kind: map(_text, records) for kind, records in zip(DESIRED_SETS, wanted, strict=True)}
        )
        names = sorted(_text(name) for name in known)
        values = await self._client.mget([self._key("epoch"), *(self._key("node", name) for name in names)])
        epoch, records = values[0], dict(zip(names, values[1:], strict=True))
        gone = [name for name, value in records.items() if value is None]
        if gone:
            await self._client.srem(self._key("nodes"), *gone)
        stored = [(name, _bytes(value)) for name, value in records.items() if value is not None]
        return _Stored(None if epoch is None else _text(epoch), stored, desired)

    async def _want(self, change: DesiredChange, term: Term | None = None) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            await watch_term(pipe, self._key("planner"), term)
            pipe.set(self._key("epoch"), random_token(self._rng), nx=True)
            for kind in DESIRED_SETS:
                if gone := change.remove.get(kind):
                    pipe.srem(self._key("desired", kind), *gone)
                if new := change.add.get(kind):
                    pipe.sadd(self._key("desired", kind), *new)
            pipe.publish(self._key("changes"), "desired")
            with as_not_leader(term):
                await pipe.execute()

    async def publish(self, record: NodeRecord) -> None:
        """Write or renew one record for its lease, and notify watchers if it changed. Raises Unreachable."""
        await self._checked(self._publish(record))

    async def _publish(self, record: NodeRecord) -> None:
        data = record.to_json()
        if not await self._renew(record, data):
            try:
                await self._write(record, data)
            except OutOfMemoryError:
                await self._write_into_reserve(record, data)
            await self._client.publish(self._key("changes"), record.incarnation)
        await self._keep_reserves()

    async def _renew(self, record: NodeRecord, data: bytes) -> bool:
        """Extend the record's lifetime, also in a full Redis. Returns whether the stored record is this one."""
        key = self._key("node", record.incarnation)
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.get(key)
            pipe.pexpire(key, _lifetime_ms(record))
            # A reader may have removed the incarnation from the set just before the record was written. This is the
            # only one of the three commands that needs memory.
            pipe.sadd(self._key("nodes"), record.incarnation)
            stored, renewed, added = await pipe.execute(raise_on_error=False)
        for answer in (stored, renewed, added):
            if isinstance(answer, Exception) and not isinstance(answer, OutOfMemoryError):
                raise answer
        return bool(renewed) and stored == data

    async def _write(self, record: NodeRecord, data: bytes) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._key("epoch"), random_token(self._rng), nx=True)
            pipe.sadd(self._key("nodes"), record.incarnation)
            pipe.set(self._key("node", record.incarnation), data, px=_lifetime_ms(record))
            await pipe.execute()

    async def _write_into_reserve(self, record: NodeRecord, data: bytes) -> None:
        """Free a reserve of a full Redis and write the record in one pipeline.

        Raises OutOfMemoryError when no reserve is left.
        """
        answers: list[Any] = []
        for number in range(RESERVES):
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.delete(self._key("reserve", str(number)))
                pipe.set(self._key("epoch"), random_token(self._rng), nx=True)
                pipe.sadd(self._key("nodes"), record.incarnation)
                pipe.set(self._key("node", record.incarnation), data, px=_lifetime_ms(record))
                answers = await pipe.execute(raise_on_error=False)
            if not any(isinstance(answer, Exception) for answer in answers):
                return
        raise next(answer for answer in answers if isinstance(answer, Exception))

    async def _keep_reserves(self) -> None:
        """Allocate missing reserves again, at most once in `_RESERVES_EVERY_S` and if there is memory for them."""
        now = self._clock.monotonic()
        if now - self._reserves_seen_at < _RESERVES_EVERY_S:
            return
        self._reserves_seen_at = now
        keys = [self._key("reserve", str(number)) for number in range(RESERVES)]
        async with self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.pexpire(key, _RESERVE_MS)
            replies = await pipe.execute()
        missing = [key for key, is_there in zip(keys, replies, strict=True) if not is_there]
        if missing:
            async with self._client.pipeline(transaction=False) as pipe:
                for key in missing:
                    pipe.set(key, bytes(RESERVE_BYTES), px=_RESERVE_MS)
                await pipe.execute(raise_on_error=False)

    async def retract(self, record: NodeRecord) -> None:
        """Delete the record of a process that has ended; see `Membership.retract`."""
        await self._checked(self._retract(record))

    async def _retract(self, record: NodeRecord) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.delete(self._key("node", record.incarnation))
            pipe.srem(self._key("nodes"), record.incarnation)
            pipe.publish(self._key("changes"), record.incarnation)
            await pipe.execute()

    def forget(self, lease: RedisLease) -> None:
        """Drop a lease that has been closed."""
        self._leases.discard(lease)

    async def _checked(self, operation: Coroutine[Any, Any, T]) -> T:
        try:
            result = await self._operate(operation)
        except REDIS_ERRORS as error:
            self._healthy = False
            reason = str(error).rstrip(".") or type(error).__name__
            raise Unreachable(f"registry {self._where} does not answer: {reason}") from None
        self._healthy = True
        return result

    async def _operate(self, operation: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(operation)
        self._operations.add(task)
        task.add_done_callback(self._settle)
        return await asyncio.shield(task)

    def _settle(self, task: asyncio.Task[Any]) -> None:
        self._operations.discard(task)
        if not task.cancelled():
            # The caller gets the error as well. Without this, asyncio would report the error of an operation whose
            # caller was cancelled as never retrieved.
            task.exception()

    def _key(self, *parts: str) -> str:
        return ":".join(("baton", self._cluster, *parts))


class RedisLease:
    """A published record that is renewed three times per lifetime; see `baton.registry.base.Lease`."""

    def __init__(self, registry: Registry, record: NodeRecord) -> None:
        self._registry = registry
        self._record = record
        self._renewer: asyncio.Task[None] | None = None
        self._publishing = asyncio.Lock()
        """Serialises updates and renewals: on two connections they could be written in either order."""
        self._closed = False

    @property
    def record(self) -> NodeRecord:
        return self._record

    async def publish(self) -> None:
        """Publish once, then renew in the background."""
        failed = not await self._try_publish()
        if not self._closed:
            self._renewer = start_background(
                lambda: self._renew(failed), "registry-lease", self._record.name, on_fault=OnFault.RESTART
            )

    async def update(self, record: NodeRecord) -> None:
        """Publish another record of the same incarnation; see `Lease.update`."""
        if (record.name, record.incarnation) != (self._record.name, self._record.incarnation):
            raise ValueError(
                f"the lease of {self._record.name} {self._record.incarnation} can't publish a record of another "
                f"incarnation: {record.name} {record.incarnation}"
            )
        self._record = record
        await self._try_publish()

    async def close(self) -> None:
        """Stop renewing and delete the record; see `Lease.close`."""
        if self._closed:
            return
        self._closed = True
        if self._renewer is not None:
            self._renewer.cancel()
            await asyncio.gather(self._renewer, return_exceptions=True)
        with contextlib.suppress(Unreachable):
            await self._registry.retract(self._record)
        self._registry.forget(self)

    async def abandon(self) -> None:
        """Stop renewing but leave the record, as a killed process would."""
        self._closed = True
        if self._renewer is not None:
            self._renewer.cancel()
            await asyncio.gather(self._renewer, return_exceptions=True)
        self._registry.forget(self)

    async def _renew(self, failed: bool) -> None:
        failures = int(failed)
        while True:
            every = self._record.lease_s / 3
            await asyncio.sleep(retry_delay(failures - 1, min(LAST_RETRY_S, every)) if failures else every)
            failures = 0 if await self._try_publish() else failures + 1

    async def _try_publish(self) -> bool:
        async with self._publishing:
            try:
                await self._registry.publish(self._record)
            except Unreachable:
                return False
        return True


def _lifetime_ms(record: NodeRecord) -> int:
    return max(1, int(record.lease_s * 1000))


def retry_delay(failures: int, longest: float) -> float:
    """The number of seconds to wait after this many failures in a row, before the next attempt."""
    return float(min(longest, FIRST_RETRY_S * 2 ** min(failures, 16)))


async def require_registry(url: str, cluster: str) -> None:
    """Check that a Redis answers, before processes are started. Raises ConfigError if none does."""
    registry = Registry.connect(url, cluster)
    try:
        await require(registry)
    finally:
        await registry.close()


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value

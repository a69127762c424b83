"""Membership in Redis (6.2 or later). No Lua, and no key outside `baton:CLUSTER:`.

    baton:CLUSTER:node:INCARNATION   one record as JSON, expires unless its process renews it
    baton:CLUSTER:nodes              set of the incarnations that ever published; readers prune it
    baton:CLUSTER:epoch              a random word; another word means that the store lost its memory
    baton:CLUSTER:starts             counts the starts of processes, see `NodeRecord.start_number`
    baton:CLUSTER:reserve:N          nothing of use: memory that is given up when a record finds Redis full
    baton:CLUSTER:desired:WORD       set of the nodes of which operators want this: cordoned, prefill, decode
    baton:CLUSTER:changes            pub/sub: somebody came, changed or left
    baton:CLUSTER:flight:REQUEST     one request under way, see `redis_flights`

Records are stored per incarnation, so no two processes ever write the same key and nothing needs a compare-and-set.
A full Redis takes no membership down. A renewal only moves the end of a record, which Redis never refuses for lack of
memory; a record that has to be written in a full Redis takes the place of a reserve, which is made again later.

Notices only make a watcher look sooner: every watcher reads everything once in `READ_EVERY_S` anyway.

No operation on a connection that others share is ever cancelled in mid-reply, because the next user of the connection
would read the reply: callers wait behind a shield, and a cancelled caller's operation runs to its end (or its timeout).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from urllib.parse import quote

from redis import asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from baton.background import OnFault, start_background
from baton.clock import Clock, SystemClock
from baton.errors import ConfigError, Unreachable
from baton.messages.ids import random_token
from baton.registry.base import require
from baton.registry.desired import WORDS, DesiredChange, DesiredMemory, DesiredState
from baton.registry.feed import Feed
from baton.registry.outage import OutageGrace
from baton.registry.records import (
    NodeRecord,
    Snapshot,
    incarnations_of,
    number_of_start,
    read_records,
)
from baton.security.redaction import without_password

T = TypeVar("T")

READ_EVERY_S = 2.0
OPERATION_TIMEOUT_S = 3.0
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
RESERVES = 16
RESERVE_BYTES = 128 << 10
"""A record takes a tenth of that; the connections that a process brings along take the rest of it."""
_RESERVE_MS = 10 * 365 * 86_400_000
"""The reserves' lifetime, which nobody waits for. That they have one is what tells whether they are there."""
_RESERVES_EVERY_S = 60.0
"""How often a process sees to it that the reserves are there."""
_SCHEMES = ("redis://", "rediss://", "unix://")
_FOREIGN = (RedisError, OSError, asyncio.TimeoutError)


@dataclass(frozen=True, slots=True)
class _Stored:
    """One full read."""

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
        """A registry at redis://, rediss:// or unix://; connects with the first operation.

        Raises ConfigError for a URL that can't be meant.
        """
        client = connect_redis(url, OPERATION_TIMEOUT_S)
        return cls(client, url, cluster, clock=clock or SystemClock(), rng=rng or Random())

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
        """One round trip; raises Unreachable with the address and the reason."""
        await self._checked(self._ping())

    async def _ping(self) -> None:
        await self._client.ping()

    async def read(self) -> Snapshot:
        """One full read, now; raises Unreachable."""
        return read_records((await self._checked(self._read())).records).snapshot

    async def lease(self, record: NodeRecord) -> RedisLease:
        """Publish the record and keep it; see `Membership.lease`."""
        lease = RedisLease(self, record)
        self._leases.add(lease)
        await lease.start()
        return lease

    async def watch(self) -> AsyncIterator[Snapshot]:
        """Every snapshot from now on; see `Membership.watch`."""
        self._begin_to_follow()
        async for snapshot in self._feed.watch():
            yield snapshot

    async def namesakes(self, name: str) -> Sequence[NodeRecord]:
        """Every incarnation of a name; see `Membership.namesakes`."""
        return incarnations_of(name, (await self._checked(self._read())).records)

    async def next_start(self, name: str) -> int:
        """The number of a start; see `Membership.next_start`."""
        return await self._checked(self._next_start(name))

    async def _next_start(self, name: str) -> int:
        try:
            counted = int(await self._client.incr(self._key("starts")))
        except ResponseError:
            # It is full, or this user of an older version's rules may not count.
            counted = 0
        return number_of_start(counted, incarnations_of(name, (await self._read()).records))

    async def desired(self) -> DesiredState:
        """What operators want, read now; raises Unreachable."""
        return (await self._checked(self._read())).desired

    async def want(self, change: DesiredChange) -> None:
        """Change what operators want; see `Membership.want`."""
        await self._checked(self._want(change))

    async def watch_desired(self) -> AsyncIterator[DesiredState]:
        """Everything that operators want; see `Membership.watch_desired`."""
        self._begin_to_follow()
        async for desired in self._desired_feed.watch():
            yield desired

    async def close(self) -> None:
        """Close every lease and watch, then the connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._feed.close()
        self._desired_feed.close()
        for lease in list(self._leases):
            await lease.close()
        if self._follower is not None:
            # Its connection is its own and is closed with it, so nobody can read what it leaves unread.
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await asyncio.gather(*self._operations, return_exceptions=True)
        with contextlib.suppress(*_FOREIGN):
            await self._client.aclose()

    def _begin_to_follow(self) -> None:
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
                    await self._take_in(stored)
                    await pubsub.get_message(ignore_subscribe_messages=True, timeout=READ_EVERY_S)
            except _FOREIGN:
                self._healthy = False
            except Exception:
                # A fault of ours, after which the watch begins anew.
                self._healthy = False
                raise
            finally:
                with contextlib.suppress(*_FOREIGN):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]
            await asyncio.sleep(retry_delay(failures, LAST_RETRY_S))
            failures += 1

    async def _take_in(self, stored: _Stored) -> None:
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
            for word in WORDS:
                pipe.smembers(self._key("desired", word))
            known, *wanted = await pipe.execute()
        desired = DesiredState.of({word: map(_text, found) for word, found in zip(WORDS, wanted, strict=True)})
        names = sorted(_text(name) for name in known)
        values = await self._client.mget([self._key("epoch"), *(self._key("node", name) for name in names)])
        epoch, found = values[0], dict(zip(names, values[1:], strict=True))
        gone = [name for name, value in found.items() if value is None]
        if gone:
            await self._client.srem(self._key("nodes"), *gone)
        stored = [(name, _bytes(value)) for name, value in found.items() if value is not None]
        return _Stored(None if epoch is None else _text(epoch), stored, desired)

    async def _want(self, change: DesiredChange) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._key("epoch"), random_token(self._rng), nx=True)
            for word in WORDS:
                if gone := change.remove.get(word):
                    pipe.srem(self._key("desired", word), *gone)
                if new := change.add.get(word):
                    pipe.sadd(self._key("desired", word), *new)
            pipe.publish(self._key("changes"), "desired")
            await pipe.execute()

    async def publish(self, record: NodeRecord) -> None:
        """Write or renew one record; tells the watchers when that changed something. For leases; raises Unreachable."""
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
        """Let the record live on if it is there as it is to be. A full Redis does that, too."""
        key = self._key("node", record.incarnation)
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.get(key)
            pipe.pexpire(key, _lifetime_ms(record))
            # A reader may have taken it for gone a moment before it was written. Only this one may find no memory.
            pipe.sadd(self._key("nodes"), record.incarnation)
            found, renewed, added = await pipe.execute(raise_on_error=False)
        for answer in (found, renewed, added):
            if isinstance(answer, Exception) and not isinstance(answer, OutOfMemoryError):
                raise answer
        return bool(renewed) and found == data

    async def _write(self, record: NodeRecord, data: bytes) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._key("epoch"), random_token(self._rng), nx=True)
            pipe.sadd(self._key("nodes"), record.incarnation)
            pipe.set(self._key("node", record.incarnation), data, px=_lifetime_ms(record))
            await pipe.execute()

    async def _write_into_reserve(self, record: NodeRecord, data: bytes) -> None:
        """Redis is full: give up a reserve and write in the same breath; raises OutOfMemoryError when none is left."""
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
        """Make those that are missing, now and then, if there is memory for them."""
        now = self._clock.monotonic()
        if now - self._reserves_seen_at < _RESERVES_EVERY_S:
            return
        self._reserves_seen_at = now
        keys = [self._key("reserve", str(number)) for number in range(RESERVES)]
        async with self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.pexpire(key, _RESERVE_MS)
            found = await pipe.execute()
        missing = [key for key, is_there in zip(keys, found, strict=True) if not is_there]
        if missing:
            async with self._client.pipeline(transaction=False) as pipe:
                for key in missing:
                    pipe.set(key, bytes(RESERVE_BYTES), px=_RESERVE_MS)
                await pipe.execute(raise_on_error=False)

    async def retract(self, record: NodeRecord) -> None:
        """Take one record back; see `Membership.retract`."""
        await self._checked(self._retract(record))

    async def _retract(self, record: NodeRecord) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.delete(self._key("node", record.incarnation))
            pipe.srem(self._key("nodes"), record.incarnation)
            pipe.publish(self._key("changes"), record.incarnation)
            await pipe.execute()

    def forget(self, lease: RedisLease) -> None:
        """The lease is closed."""
        self._leases.discard(lease)

    async def _checked(self, operation: Coroutine[Any, Any, T]) -> T:
        try:
            result = await self._operate(operation)
        except _FOREIGN as error:
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
            # Whoever waited has the error too; one whose caller was cancelled must not be reported as lost.
            task.exception()

    def _key(self, *parts: str) -> str:
        return ":".join(("baton", self._cluster, *parts))


class RedisLease:
    """A record that is renewed three times in each of its lifetimes; see `baton.registry.base.Lease`."""

    def __init__(self, registry: Registry, record: NodeRecord) -> None:
        self._registry = registry
        self._record = record
        self._renewer: asyncio.Task[None] | None = None
        self._publishing = asyncio.Lock()
        """Each on a connection of its own, an update and a renewal beside it could be written in either order."""
        self._closed = False

    @property
    def record(self) -> NodeRecord:
        return self._record

    async def start(self) -> None:
        """Publish once, then go on in the background."""
        failed = not await self._try_publish()
        if not self._closed:
            self._renewer = start_background(
                lambda: self._renew(failed), "registry-lease", self._record.name, on_fault=OnFault.RESTART
            )

    async def update(self, record: NodeRecord) -> None:
        """Publish another record of the same incarnation; see `Lease.update`."""
        if (record.name, record.incarnation) != (self._record.name, self._record.incarnation):
            raise ValueError(f"this lease is {self._record.incarnation}'s, not {record.incarnation}'s")
        self._record = record
        await self._try_publish()

    async def close(self) -> None:
        """Stop renewing and take the record back; see `Lease.close`."""
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
        """Stop renewing but leave the record, as a killed process does."""
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
    """Seconds to wait after this many failures in a row before the next try."""
    return float(min(longest, FIRST_RETRY_S * 2 ** min(failures, 16)))


def connect_redis(url: str, timeout_s: float) -> redis.Redis:
    """A client that connects with its first operation and repeats none; raises ConfigError for a bad URL."""
    check_registry_url(url)
    try:
        client: redis.Redis = redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"registry {without_password(url)!r}: {error}") from None
    return client


def with_authority(url: str, ca: Path | None) -> str:
    """The URL, which says whom to believe if it is one with TLS and does not yet."""
    if ca is None or not url.startswith("rediss://") or "ssl_ca_certs=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}ssl_ca_certs={quote(str(ca))}"


def check_registry_url(url: str) -> None:
    """Raises ConfigError for a URL that can't be a registry's."""
    if not url.startswith(_SCHEMES):
        raise ConfigError(f"registry {without_password(url)!r} is no URL of Redis: use {', '.join(_SCHEMES)}…")


async def require_registry(url: str, cluster: str) -> None:
    """For processes that are about to start; raises ConfigError when no Redis answers there."""
    registry = Registry.connect(url, cluster)
    try:
        await require(registry)
    finally:
        await registry.close()


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value

"""Records of requests under way in Redis: `baton:CLUSTER:flight:REQUEST_ID`, each with a lifetime. A value begins
with the flight that it is of, in 16 hexadecimal digits; the record follows.

One task writes, many records in one round trip; who puts a record only leaves it in a dictionary, so nobody ever waits
for Redis, and of several writes for one request only the last one is made. As everywhere, no operation is cancelled in
mid-reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice

from redis import asyncio as redis
from redis.exceptions import RedisError

from baton.background import OnFault, current_watch, start_background
from baton.observe.log_limit import LimitedLog
from baton.registry.flights import ENDED_S, LIFETIME_S, MAX_RECORD_BYTES
from baton.registry.registry import LAST_RETRY_S, connect_redis, retry_delay

_log = logging.getLogger(__name__)

MAX_PENDING = 4096
_WRITER = "flight-records"
"""The task's name, and the kind of its faults."""
_BATCH = 256
_PAUSE_S = 0.005
"""Between two round trips: what comes meanwhile shares the next one, most of whose cost is its own."""
_OWNER_BYTES = 16
_TIMEOUT_S = 1.0
_READS_AT_ONCE = 4
"""Each takes a connection, which stays: when a router is lost thousands of requests may be looked for at once."""
_FOREIGN = (RedisError, OSError, asyncio.TimeoutError)


@dataclass(frozen=True, slots=True)
class _Write:
    record: bytes | None
    """None: the one that is there only gets another lifetime, if it is of this flight."""
    lifetime_s: float
    owner: bytes


class RedisFlightRecords:
    """One process's access to the records of one cluster; see `baton.registry.flights.FlightRecords`."""

    def __init__(self, client: redis.Redis, cluster: str, *, lifetime_s: float = LIFETIME_S) -> None:
        self._client = client
        self._cluster = cluster
        self._lifetime_s = lifetime_s
        self._pending: dict[str, _Write] = {}
        self._num_lost = 0
        self._filled = asyncio.Event()
        self._closing = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._reads: set[asyncio.Task[bytes | None]] = set()
        self._read_turns = asyncio.Semaphore(_READS_AT_ONCE)
        self._unreadable = LimitedLog(_log)
        self._unwritable = LimitedLog(_log)

    @classmethod
    def connect(cls, url: str, cluster: str, *, lifetime_s: float = LIFETIME_S) -> RedisFlightRecords:
        """Connects with the first operation; raises ConfigError for a URL that can't be meant."""
        return cls(connect_redis(url, _TIMEOUT_S), cluster, lifetime_s=lifetime_s)

    @property
    def num_lost(self) -> int:
        return self._num_lost

    def put(self, request_id: str, record: bytes, owner: int = 0) -> None:
        """Keep this record from now on; see `FlightRecords.put`."""
        if len(record) > MAX_RECORD_BYTES:
            self._num_lost += 1
            return
        self._add(request_id, _Write(record, self._lifetime_s, _owner(owner)))

    def end(self, request_id: str, owner: int = 0) -> None:
        """This flight is over; see `FlightRecords.end`."""
        lifetime_s, name = min(ENDED_S, self._lifetime_s), _owner(owner)
        before = self._pending.get(request_id)
        if before is None or before.record is None:
            self._add(request_id, _Write(None, lifetime_s, name))
        elif before.owner == name:
            self._add(request_id, replace(before, lifetime_s=lifetime_s))

    def _add(self, request_id: str, write: _Write) -> None:
        if self._closing.is_set():
            return
        self._pending.pop(request_id, None)
        if len(self._pending) >= MAX_PENDING:
            self._pending.pop(next(iter(self._pending)))
            self._num_lost += 1
        self._pending[request_id] = write
        self._filled.set()
        if self._writer is None:
            self._writer = start_background(self._write, _WRITER, on_fault=OnFault.RESTART, may_end=True)

    async def get(self, request_id: str) -> bytes | None:
        """The record; see `FlightRecords.get`."""
        pending = self._pending.get(request_id)
        if pending is not None and pending.record is not None:
            return pending.record
        if self._closing.is_set():
            return None
        task = asyncio.create_task(self._read(request_id))
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)
        return await asyncio.shield(task)

    async def _read(self, request_id: str) -> bytes | None:
        try:
            # Only the wait for a turn is ever cut short, not an operation.
            async with asyncio.timeout(_TIMEOUT_S):
                await self._read_turns.acquire()
            try:
                found = await self._client.get(self._key(request_id))
            finally:
                self._read_turns.release()
        except _FOREIGN as error:
            self._unreadable.happened("records of requests can't be read, like that of %s: %s", request_id, error)
            return None
        return _bytes(found)[_OWNER_BYTES:] if found is not None else None

    async def close(self) -> None:
        """Write what is left, as far as that works at once. Idempotent."""
        self._closing.set()
        self._filled.set()
        if self._writer is not None:
            await self._writer
        await asyncio.gather(*self._reads, return_exceptions=True)
        with contextlib.suppress(*_FOREIGN):
            await self._client.aclose()

    async def _write(self) -> None:
        failures = 0
        while self._pending or not self._closing.is_set():
            await self._filled.wait()
            self._filled.clear()
            while self._pending:
                batch = dict(islice(self._pending.items(), _BATCH))
                for request_id in batch:
                    del self._pending[request_id]
                try:
                    await self._send(batch)
                    failures = 0
                    self._unwritable.is_over("records of requests are written again")
                    if not self._closing.is_set():
                        await asyncio.sleep(_PAUSE_S)
                except _FOREIGN as error:
                    failures += 1
                    self._keep(batch)
                    self._unwritable.happened(
                        "records of requests can't be written, and requests go on without them: %s", error
                    )
                    if self._closing.is_set():
                        return
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._closing.wait(), retry_delay(failures, LAST_RETRY_S))
                except Exception as error:
                    # These are lost, and perhaps the cause of it: whatever it was, the next ones are to be written.
                    self._num_lost += len(batch)
                    current_watch.get().note(_WRITER, error, f"{len(batch)} records of requests are lost")

    def _keep(self, batch: Mapping[str, _Write]) -> None:
        """For the next try, where nothing newer and no crowd is in the way. The oldest go first."""
        kept = {request_id: write for request_id, write in batch.items() if request_id not in self._pending}
        room = MAX_PENDING - len(self._pending)
        lost = max(0, len(kept) - room)
        self._num_lost += lost
        self._pending = {**dict(islice(kept.items(), lost, None)), **self._pending}

    async def _send(self, batch: Mapping[str, _Write]) -> None:
        ends = {request_id: write for request_id, write in batch.items() if write.record is None}
        others = await self._of_others(ends)
        async with self._client.pipeline(transaction=False) as pipe:
            for request_id, write in batch.items():
                lifetime_ms = max(1, int(write.lifetime_s * 1000))
                if write.record is not None:
                    pipe.set(self._key(request_id), write.owner + write.record, px=lifetime_ms)
                elif request_id not in others:
                    pipe.pexpire(self._key(request_id), lifetime_ms)
            await pipe.execute()

    async def _of_others(self, ends: Mapping[str, _Write]) -> set[str]:
        """Which of these are records of other flights than those that ended: those go on.

        This and the writes that follow are not one step, since that takes a script, which users' access lists don't
        allow: a record that another router puts in between gets the short lifetime.
        """
        if not ends:
            return set()
        found = await self._client.mget([self._key(request_id) for request_id in ends])
        return {
            request_id
            for (request_id, write), value in zip(ends.items(), found, strict=True)
            if value is not None and _bytes(value)[:_OWNER_BYTES] != write.owner
        }

    def _key(self, request_id: str) -> str:
        return f"baton:{self._cluster}:flight:{request_id}"


def _owner(flight: int) -> bytes:
    return b"%016x" % flight


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value

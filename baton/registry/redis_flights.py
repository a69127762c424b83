"""Records of running requests in Redis, under `baton:CLUSTER:flight:REQUEST_ID`, each with a lifetime. A value is the
number of its flight in 16 hexadecimal digits, followed by the record.

One task writes many records in one round trip. `put` only adds the record to a queue, so that no caller waits for
Redis, and of several queued writes for one request only the last one is made. No operation is cancelled while its reply
is outstanding (see `registry`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from redis import asyncio as redis

from baton.background import OnFault, current_watch, start_background
from baton.observe.log_limit import LimitedLog
from baton.registry.base import ENDED_S, MAX_RECORD_BYTES
from baton.registry.connection import REDIS_ERRORS, connect_redis
from baton.registry.registry import LAST_RETRY_S, retry_delay
from baton.values import value

_log = logging.getLogger(__name__)

MAX_PENDING = 4096
_WRITER = "flight-records"
"""The name of the task, which is also the label of its faults."""
_BATCH = 256
_PAUSE_S = 0.005
"""Pause between two round trips, in seconds. Records queued meanwhile share the next one, whose cost hardly depends on
how many there are."""
_OWNER_BYTES = 16
_TIMEOUT_S = 1.0
_READS_AT_ONCE = 4
"""Limit of concurrent reads. Each opens a connection, which stays open, and after the loss of a router thousands of
requests may be read at once."""


@value(frozen=True, slots=True)
class _Write:
    record: bytes | None
    """The record; None: change only the lifetime of the stored record, if it belongs to this flight."""
    lifetime_s: float
    owner: bytes


class RedisFlightRecords:
    """One process's access to the records of one cluster; see `baton.registry.base.FlightRecords`."""

    def __init__(self, client: redis.Redis, cluster: str, *, lifetime_s: float) -> None:
        """`lifetime_s`: seconds that the record of a running request is kept after it was last written."""
        self._client = client
        self._cluster = cluster
        self._lifetime_s = lifetime_s
        self._pending: dict[str, _Write] = {}
        self._num_lost = 0
        self._filled = asyncio.Event()
        self._closing = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._reads: set[asyncio.Task[bytes | None]] = set()
        self._read_slots = asyncio.Semaphore(_READS_AT_ONCE)
        self._unreadable = LimitedLog(_log)
        self._unwritable = LimitedLog(_log)

    @classmethod
    def connect(cls, url: str, cluster: str, *, lifetime_s: float) -> RedisFlightRecords:
        """Make the access to the Redis at `url`. The first operation connects. Raises ConfigError for a bad URL."""
        return cls(connect_redis(url, _TIMEOUT_S), cluster, lifetime_s=lifetime_s)

    @property
    def num_lost(self) -> int:
        return self._num_lost

    def put(self, request_id: str, record: bytes, owner: int = 0) -> None:
        """Store this record; see `FlightRecords.put`."""
        if len(record) > MAX_RECORD_BYTES:
            self._num_lost += 1
            return
        self._add(request_id, _Write(record, self._lifetime_s, _owner(owner)))

    def expire_soon(self, request_id: str, owner: int = 0) -> None:
        """Let the record of an ended flight expire soon; see `FlightRecords.expire_soon`."""
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
            # The timeout covers the wait for the semaphore, never a Redis operation.
            async with asyncio.timeout(_TIMEOUT_S):
                await self._read_slots.acquire()
            try:
                stored = await self._client.get(self._key(request_id))
            finally:
                self._read_slots.release()
        except REDIS_ERRORS as error:
            self._unreadable.happened(
                "the record of request %s can't be read from Redis, so no router can take it over: %s",
                request_id,
                error,
            )
            return None
        return _bytes(stored)[_OWNER_BYTES:] if stored is not None else None

    async def close(self) -> None:
        """Try once to write what is queued, then disconnect. Idempotent."""
        self._closing.set()
        self._filled.set()
        if self._writer is not None:
            await self._writer
        await asyncio.gather(*self._reads, return_exceptions=True)
        with contextlib.suppress(*REDIS_ERRORS):
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
                    self._unwritable.is_over("records of requests are written to Redis again")
                    if not self._closing.is_set():
                        await asyncio.sleep(_PAUSE_S)
                except REDIS_ERRORS as error:
                    failures += 1
                    self._keep(batch)
                    self._unwritable.happened(
                        "records of requests can't be written to Redis; requests go on, but other routers can't take "
                        "them over: %s",
                        error,
                    )
                    if self._closing.is_set():
                        return
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._closing.wait(), retry_delay(failures, LAST_RETRY_S))
                except Exception as error:
                    # This batch is lost, and may itself be the cause. The next batches are still to be written.
                    self._num_lost += len(batch)
                    current_watch.get().note(_WRITER, error, f"{len(batch)} records of requests are lost")

    def _keep(self, batch: Mapping[str, _Write]) -> None:
        """Queue a failed batch again, without records that newer ones replace.

        When the queue is full the oldest are lost.
        """
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
                    # `pipe.set` looks at eight options for each call, which takes longer than all the rest.
                    pipe.execute_command("SET", self._key(request_id), write.owner + write.record, "PX", lifetime_ms)
                elif request_id not in others:
                    pipe.pexpire(self._key(request_id), lifetime_ms)
            await pipe.execute()

    async def _of_others(self, ends: Mapping[str, _Write]) -> set[str]:
        """The requests whose stored record belongs to another flight than the one that ended; those records stay.

        This read and the writes that follow are not atomic: that would take a script. A record that another router
        writes in between gets the short lifetime.
        """
        if not ends:
            return set()
        stored = await self._client.mget([self._key(request_id) for request_id in ends])
        return {
            request_id
            for (request_id, write), value in zip(ends.items(), stored, strict=True)
            if value is not None and _bytes(value)[:_OWNER_BYTES] != write.owner
        }

    def _key(self, request_id: str) -> str:
        return f"baton:{self._cluster}:flight:{request_id}"


def _owner(flight: int) -> bytes:
    return b"%016x" % flight


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value

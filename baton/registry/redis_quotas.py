"""What is used of quotas, in Redis, so that they hold over all routers of a cluster; the rules are those of `quotas`.

    baton:CLUSTER:quota:NAME    of a rate: when its bucket will be full, and when that was written, in ms on Redis's
                                clock; expires when it is full
    baton:CLUSTER:running:NAME  of a room: a sorted set of leases, by when they expire

A request that has quotas costs one call of a script, in which Redis reads its own clock, so that the clocks of routers
do not matter. One task makes all calls, in their order: calls that come meanwhile share the next round trip, and a
lease that was given back can't be renewed later.

While Redis can't be reached nothing is taken. What ended requests have not used is lost to their tenants then: a call
whose reply is lost may have been made, and made twice it would give back too much.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import asyncio as redis

from baton.background import OnFault, current_watch, start_background
from baton.clock import Clock
from baton.errors import Unreachable
from baton.observe.log_limit import LimitedLog
from baton.registry.connection import REDIS_ERRORS, connect_redis
from baton.registry.quotas import FULL_ROOM_WAIT_S, LEASE_S, QuotaUse, Taken
from baton.registry.registry import LAST_RETRY_S, retry_delay
from baton.security.redaction import without_password

_log = logging.getLogger(__name__)

RENEW_EVERY_S = LEASE_S / 3
MAX_PENDING = 4096
"""The most requests that wait for Redis; of those that have ended as many leases wait to be given back."""
_WORKER = "quotas"
"""The name of the task, which is also the label of its faults."""
_BATCH = 256
_TIMEOUT_S = 1.0

_NOW = """
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + time[2] / 1000
end
"""
_LEASE = """
local function lease(key, name, lease_ms)
  redis.call('ZADD', key, string.format('%.3f', now + lease_ms), name)
  redis.call('PEXPIRE', key, lease_ms)
end
local function fills(key, at)
  redis.call('SET', key, string.format('%.3f %.3f', at, now), 'PX', math.ceil(at - now) + 1)
end
local function full_at(key)
  local at, written = string.match(redis.call('GET', key) or '', '(%S+) (%S+)')
  at, written = tonumber(at or 0), tonumber(written or 0)
  if written > now then
    -- The clock was set back, and what was to come would come later by that. From now on it counts from here.
    at = at - (written - now)
    fills(key, at)
  end
  return math.max(now, at)
end
"""
_TAKE = (
    _NOW
    + _LEASE
    + """
local name, lease_ms, full_ms, num = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local short, wait, levels = 0, 0, {}
for i = 1, num do
  local period, cost = tonumber(ARGV[4 + 2 * i]), tonumber(ARGV[5 + 2 * i])
  local at = full_at(KEYS[i])
  levels[i] = at - now
  local late = at + cost - now - period
  if cost > 0 and late > math.max(wait, 0.01) then
    short, wait = i, late
  end
end
for i = num + 1, #KEYS do
  redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', now)
  local limit = tonumber(ARGV[5 + num + i])
  if limit > 0 and redis.call('ZCARD', KEYS[i]) >= limit and wait < full_ms then
    short, wait = i, full_ms
  end
end
if short == 0 then
  for i = 1, num do
    levels[i] = levels[i] + tonumber(ARGV[5 + 2 * i])
    if levels[i] > 0 then
      fills(KEYS[i], now + levels[i])
    end
  end
  for i = num + 1, #KEYS do
    lease(KEYS[i], name, lease_ms)
  end
end
local answer = {tostring(short), string.format('%.3f', wait)}
for i = 1, num do
  answer[2 + i] = string.format('%.3f', levels[i])
end
return answer
"""
)
"""KEYS: of the rates, then of the rooms. ARGV: the time or nothing, the lease, its ms, the wait for a full room in ms,
the number of rates; for each rate its period and the request's cost in ms; for each room its limit."""
_GIVE_BACK = (
    _NOW
    + _LEASE
    + """
local num = tonumber(ARGV[3])
for i = 1, num do
  local change = tonumber(ARGV[3 + i])
  if change ~= 0 then
    local at = full_at(KEYS[i]) + change
    if at > now then
      fills(KEYS[i], at)
    else
      redis.call('DEL', KEYS[i])
    end
  end
end
for i = num + 1, #KEYS do
  redis.call('ZREM', KEYS[i], ARGV[2])
end
"""
)
"""KEYS: as above. ARGV: the time or nothing, the lease, the number of rates, the change of each in ms."""
_RENEW = (
    _NOW
    + _LEASE
    + """
for i = 3, #ARGV do
  lease(KEYS[1], ARGV[i], tonumber(ARGV[2]))
end
"""
)
"""KEYS: of one room. ARGV: the time or nothing, the ms of a lease, the leases."""
_RENEWED_AT_ONCE = 500


@dataclass(slots=True)
class _Call:
    """A call of a script, and who waits for its answer."""

    script: str
    keys: Sequence[str]
    arguments: Sequence[str]
    use: QuotaUse | None
    """What the call takes or gives back; None: it renews."""
    answer: asyncio.Future[Any] | None = None


class RedisQuotas:
    """One router's use of the quotas of its cluster; see `baton.registry.quotas.QuotaStore`."""

    def __init__(self, client: redis.Redis, where: str, cluster: str, clock: Clock | None = None) -> None:
        """`clock`: in place of Redis's own, for tests. `where`: the server, for messages."""
        self._client = client
        self._where = where
        self._cluster = cluster
        self._clock = clock
        self._pending: list[_Call] = []
        self._num_waiting = 0
        self._held: dict[str, QuotaUse] = {}
        """By lease, what running requests have taken in rooms."""
        self._filled = asyncio.Event()
        self._closing = False
        self._worker: asyncio.Task[None] | None = None
        self._renew_at = 0.0
        self._unreachable = LimitedLog(_log)

    @classmethod
    def connect(cls, url: str, cluster: str, clock: Clock | None = None) -> RedisQuotas:
        """Make the access to the Redis at `url`. The first operation connects. Raises ConfigError for a bad URL."""
        return cls(connect_redis(url, _TIMEOUT_S), without_password(url), cluster, clock)

    async def take(self, use: QuotaUse) -> Taken:
        """Take it, or nothing; see `QuotaStore.take`."""
        if self._closing:
            raise Unreachable("this router is shutting down: ask another one")
        if self._num_waiting >= MAX_PENDING:
            raise Unreachable(f"Redis at {self._where} does not answer as fast as requests come")
        words = [use.lease, _ms(LEASE_S), _ms(FULL_ROOM_WAIT_S), str(len(use.rates))]
        for rate in use.rates:
            words += [_ms(rate.period_s), _ms(rate.cost_s)]
        words += [str(room.limit) for room in use.rooms]
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._call(_Call(_TAKE, self._keys(use), words, use, answer))
        self._num_waiting += 1
        try:
            short, wait_ms, *levels_ms = await answer
        except asyncio.CancelledError:
            # If it was sent, the script may run all the same. What it takes of rates stays used: nothing was given back
            # for it.
            self._give_lease_back(use)
            raise
        finally:
            self._num_waiting -= 1
        levels_s = [float(level) / 1e3 for level in levels_ms]
        if int(short):
            return Taken(levels_s, int(short) - 1, float(wait_ms) / 1e3)
        if use.rooms:
            self._held[use.lease] = use
            self._filled.set()  # the worker has to wake up in time to renew it
        return Taken(levels_s)

    def give_back(self, use: QuotaUse, changes_s: Sequence[float]) -> None:
        """Give back what was taken; see `QuotaStore.give_back`."""
        self._held.pop(use.lease, None)
        if use.rooms or any(changes_s):
            words = [use.lease, str(len(use.rates)), *map(_ms, changes_s)]
            self._call(_Call(_GIVE_BACK, self._keys(use), words, use))

    async def renew(self) -> None:
        """Renew the leases now; the worker does so every `RENEW_EVERY_S` seconds. Raises Unreachable."""
        self._renew_at = 0.0
        await self.take(QuotaUse(""))

    async def close(self) -> None:
        """Give back all leases, if Redis can be reached, and disconnect. Idempotent."""
        for use in list(self._held.values()):
            self._give_lease_back(use)
        self._closing = True
        self._filled.set()
        if self._worker is not None:
            await self._worker
        with contextlib.suppress(*REDIS_ERRORS):
            await self._client.aclose()

    def _give_lease_back(self, use: QuotaUse) -> None:
        self.give_back(QuotaUse(use.lease, (), use.rooms), ())

    def _call(self, call: _Call) -> None:
        if self._closing:
            return
        self._pending.append(call)
        self._filled.set()
        if self._worker is None:
            self._worker = start_background(self._work, _WORKER, on_fault=OnFault.RESTART, may_end=True)

    async def _work(self) -> None:
        loop, failures = asyncio.get_running_loop(), 0
        while self._pending or not self._closing:
            # The timeout covers the wait for calls, never an operation of Redis.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._renew_at - loop.time()) if self._held else None):
                    await self._filled.wait()
            self._filled.clear()
            while batch := self._next_batch():
                try:
                    await self._send(batch)
                    failures = 0
                    self._unreachable.is_over("quotas are kept in Redis again")
                except Exception as error:
                    if not isinstance(error, REDIS_ERRORS):
                        current_watch.get().note(_WORKER, error, f"{len(batch)} calls for quotas have failed")
                    failures += 1
                    self._failed(batch, error)
                    if self._closing:
                        return
                    await asyncio.sleep(retry_delay(failures, LAST_RETRY_S))

    def _next_batch(self) -> list[_Call]:
        """The calls to be made now: renewals that are due, and others, unless who waits for them was cancelled."""
        now = asyncio.get_running_loop().time()
        if now >= self._renew_at:
            self._renew_at = now + RENEW_EVERY_S
            self._pending = [*self._renewals(), *self._pending]
        pending = [call for call in self._pending if call.answer is None or not call.answer.cancelled()]
        batch, self._pending = pending[:_BATCH], pending[_BATCH:]
        return batch

    def _renewals(self) -> list[_Call]:
        leases: dict[str, list[str]] = {}
        for name, use in self._held.items():
            for room in use.rooms:
                leases.setdefault(room.name, []).append(name)
        return [
            _Call(_RENEW, [self._key("running", room)], [_ms(LEASE_S), *names[at : at + _RENEWED_AT_ONCE]], None)
            for room, names in leases.items()
            for at in range(0, len(names), _RENEWED_AT_ONCE)
        ]

    async def _send(self, batch: Sequence[_Call]) -> None:
        """Make the calls. Raises what Redis raised for any of them, if the others got their answers or not."""
        now = "" if self._clock is None else _ms(self._clock.monotonic())
        async with self._client.pipeline(transaction=False) as pipe:
            for call in batch:
                pipe.eval(call.script, len(call.keys), *call.keys, now, *call.arguments)
            answers = await pipe.execute(raise_on_error=False)
        failed = next((answer for answer in answers if isinstance(answer, Exception)), None)
        for call, answer in zip(batch, answers, strict=True):
            if call.answer is not None and not call.answer.done() and not isinstance(answer, Exception):
                call.answer.set_result(answer)
        if failed is not None:
            raise failed

    def _failed(self, batch: Sequence[_Call], error: Exception) -> None:
        """Tell those that wait, and give back the leases that may have been made, or were to be given back."""
        self._unreachable.happened(
            "quotas can't be checked in Redis, so requests of tenants and keys that have some are refused: %s", error
        )
        why = f"Redis at {self._where}: {str(error) or type(error).__name__}"
        leases = []
        for call in batch:
            is_answered = call.answer is not None and call.answer.done()
            if call.use is not None and call.use.rooms and not is_answered:
                use = QuotaUse(call.use.lease, (), call.use.rooms)
                leases.append(_Call(_GIVE_BACK, self._keys(use), [use.lease, "0"], use))
        for call in (*batch, *self._pending):
            if call.answer is not None and not call.answer.done():
                call.answer.set_exception(Unreachable(why))
        # Leases that are left out expire.
        self._pending = [*leases, *(call for call in self._pending if call.answer is None)][-MAX_PENDING:]

    def _keys(self, use: QuotaUse) -> list[str]:
        rates = [self._key("quota", rate.name) for rate in use.rates]
        return [*rates, *(self._key("running", room.name) for room in use.rooms)]

    def _key(self, kind: str, name: str) -> str:
        return f"baton:{self._cluster}:{kind}:{name}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"

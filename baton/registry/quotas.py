"""What requests have used of their quotas: the rules, and the store for a cluster of one router without Redis.

A rate is a bucket of `limit` units that fills again within `period_s`, kept as one number: the time at which it will be
full (the generic cell rate algorithm, ATM Forum TM 4.0). The rules:

1. A request takes what it may cost at most, or nothing if any of its limits is short of it.
2. What it takes has places on the axis of time: the next ones at which the bucket fills again, from now on at the
   earliest and no later than one period from now.
3. When a request ends, what it has not used is given back, as far as its places still lie ahead. Those that lie behind
   may have been used by others, since the bucket has filled again there. What it used beyond what it took is taken as
   well, though the bucket may then be more than empty.

So requests never use more than `limit * (1 + t / period_s)` within any t seconds: a full bucket, and what it gained
meanwhile. Only one request that may cost more than the limit can exceed that, by its excess, for which others wait.

A room is a number of requests that may run at once. Each that runs has a lease there, which its router renews.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.clock import Clock
from baton.values import value

LEASE_S = 15.0
"""So long after the end of a router its requests count as running."""
FULL_ROOM_WAIT_S = 1.0
"""After so many seconds a request should come again that found a room full: nobody knows when one ends."""
_SLACK_S = 1e-5
"""Differences that are due to rounding."""
_TIDY_EVERY = 1024
"""So many requests later, what is not needed any more is forgotten."""


@value(frozen=True, slots=True)
class RateUse:
    """What a request takes of one rate."""

    name: str
    """The name of the bucket, such as `tenant:acme:tokens_per_minute`."""
    limit: int
    """The units that it holds."""
    period_s: float
    cost: float
    """The units that the request takes, at most `limit`."""

    @property
    def cost_s(self) -> float:
        """In how many seconds they come back."""
        return self.cost * self.period_s / self.limit


@value(frozen=True, slots=True)
class ConcurrencyUse:
    """A room in which a request has a lease while it runs."""

    name: str
    limit: int
    """The most requests at once; 0: they are only counted, for requests with other keys."""


@value(frozen=True, slots=True)
class QuotaUse:
    """What one request takes of all its quotas."""

    lease: str
    """The name of the request's lease, of which there is no other one."""
    rates: Sequence[RateUse] = ()
    rooms: Sequence[ConcurrencyUse] = ()


@value(frozen=True, slots=True)
class Taken:
    """Whether a request got what it wanted to take."""

    levels_s: Sequence[float]
    """For each rate, in how many seconds its bucket will be full."""
    short_of: int | None = None
    """The limit that was short: an index into the rates, followed by the rooms. None: the request took all."""
    wait_s: float = 0.0
    """After how many seconds it has a chance again."""


class QuotaStore(Protocol):
    """What is used of the quotas of one cluster, for one router. All calls come from one event loop."""

    async def take(self, use: QuotaUse) -> Taken:
        """Take it, or nothing. Raises Unreachable: then it may have been taken, but no lease stays."""
        ...

    def give_back(self, use: QuotaUse, changes_s: Sequence[float]) -> None:
        """Give back what was taken. Never waits and never raises.

        `changes_s`: for each rate by how many seconds its bucket is full later than it would be now, less than 0 for
        what was not used (see `unused_s`).
        """
        ...

    async def close(self) -> None:
        """End this router's use. Idempotent."""
        ...


def unused_s(rate: RateUse, used: float, since_s: float) -> float:
    """The change with which a request that took `rate.cost` units `since_s` seconds ago gives back all but `used`."""
    change_s = used * rate.period_s / rate.limit - rate.cost_s
    return max(change_s, min(0.0, since_s - rate.cost_s))


class QuotaBook:
    """What is used of the quotas, by rules 1 to 3. Pure: times are arguments, in seconds on one clock."""

    def __init__(self) -> None:
        self._full_at: dict[str, float] = {}
        self._leases: dict[str, dict[str, float]] = {}
        """By room, for each lease until when it holds."""
        self._num_takes = 0
        self._now = float("-inf")
        """The time of the last call."""

    def take(self, use: QuotaUse, now: float, lease_s: float = LEASE_S) -> Taken:
        """Take it, or nothing."""
        self._set_clock(now)
        self._num_takes += 1
        if self._num_takes % _TIDY_EVERY == 0:
            self._tidy(now)
        short_of, wait_s, before = None, 0.0, []
        for index, rate in enumerate(use.rates):
            before.append(max(now, self._full_at.get(rate.name, now)))
            late_s = before[-1] + rate.cost_s - now - rate.period_s
            if rate.cost > 0 and late_s > max(wait_s, _SLACK_S):
                short_of, wait_s = index, late_s
        for index, room in enumerate(use.rooms, len(use.rates)):
            if room.limit and self._num_in(room.name, now) >= room.limit and wait_s < FULL_ROOM_WAIT_S:
                short_of, wait_s = index, FULL_ROOM_WAIT_S
        if short_of is not None:
            return Taken([at - now for at in before], short_of, wait_s)
        levels_s = [at - now + rate.cost_s for at, rate in zip(before, use.rates, strict=True)]
        self._full_at |= {rate.name: now + level_s for rate, level_s in zip(use.rates, levels_s, strict=True)}
        self.renew(use, now, lease_s)
        return Taken(levels_s)

    def renew(self, use: QuotaUse, now: float, lease_s: float = LEASE_S) -> None:
        """Let the leases of a request hold for longer."""
        for room in use.rooms:
            self._leases.setdefault(room.name, {})[use.lease] = now + lease_s

    def give_back(self, use: QuotaUse, changes_s: Sequence[float], now: float) -> None:
        """Give back what was taken; see `QuotaStore.give_back`."""
        self._set_clock(now)
        for rate, change_s in zip(use.rates, changes_s, strict=True):
            if change_s:
                self._full_at[rate.name] = max(now, max(now, self._full_at.get(rate.name, now)) + change_s)
        for room in use.rooms:
            self._leases.get(room.name, {}).pop(use.lease, None)

    def _set_clock(self, now: float) -> None:
        """Where the clock was set back, let buckets be full no later than they would have been."""
        if now < self._now:
            self._full_at = {name: at - (self._now - now) for name, at in self._full_at.items()}
        self._now = now

    def _num_in(self, room: str, now: float) -> int:
        held = {lease: until for lease, until in self._leases.get(room, {}).items() if until > now}
        self._leases[room] = held
        return len(held)

    def _tidy(self, now: float) -> None:
        self._full_at = {name: at for name, at in self._full_at.items() if at > now}
        for room in list(self._leases):
            if not self._num_in(room, now):
                del self._leases[room]


class ProcessQuotas:
    """The store of a cluster whose only router is this process; see `QuotaStore`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._book = QuotaBook()

    async def take(self, use: QuotaUse) -> Taken:
        return self._book.take(use, self._clock.monotonic(), lease_s=float("inf"))

    def give_back(self, use: QuotaUse, changes_s: Sequence[float]) -> None:
        self._book.give_back(use, changes_s, self._clock.monotonic())

    async def close(self) -> None:
        return

"""What one request takes of the quotas of its tenant and of its key, and what answers tell of them.

Where the quotas are kept, and by which rules, is in `baton.registry.quotas`. A request takes the tokens of its prompt
and the most that it may generate, before it may wait for nodes; what it has not used is given back when it ends. One
that may generate more than a limit takes the whole limit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from baton.clock import Clock, SystemClock
from baton.errors import QuotaExceeded, QuotaTooSmall, QuotaUnknown, Unreachable
from baton.registry.quotas import ConcurrencyUse, ProcessQuotas, QuotaStore, QuotaUse, RateUse, unused_s
from baton.security.matrix import Caller
from baton.security.quotas import Quotas
from baton.values import value

_MINUTE_S, _DAY_S = 60.0, 86_400.0
_PERIODS = {"requests_per_minute": _MINUTE_S, "tokens_per_minute": _MINUTE_S, "tokens_per_day": _DAY_S}
REASONS = ("max_concurrent", *_PERIODS, "unreachable")
"""Why a request may be refused: by the limit that was short, or since nobody knows what is used of it."""
_MAX_REMEMBERED = 10_000
"""So many keys are remembered with what they had left."""


@value(frozen=True, slots=True)
class RateLimit:
    """What a caller is told of one of its limits."""

    kind: str
    """requests or tokens."""
    limit: int
    remaining: int
    reset_s: float
    """After how many seconds all of it remains, if nothing is used meanwhile."""


@value(frozen=True, slots=True)
class _Seen:
    """What was used of the rates of a key when they were asked for last."""

    rates: Sequence[RateUse]
    levels_s: Sequence[float]
    at: float


class RateLimiter:
    """Takes quotas for the requests of one router."""

    def __init__(self, store: QuotaStore | None = None, clock: Clock | None = None, owner: str = "") -> None:
        """Without a store quotas are kept in this process. `owner`: this router's incarnation."""
        self.clock = clock or SystemClock()
        self.store = store or ProcessQuotas(self.clock)
        self._owner = owner
        self._numbers = itertools.count(1)
        self._seen: OrderedDict[tuple[str, str], _Seen] = OrderedDict()

    def open(self, caller: Caller, on_refused: Callable[[str], None]) -> RequestQuota | None:
        """What a request of the caller takes; None: it has no quotas. `on_refused` gets one of REASONS."""
        if not caller.has_quotas:
            return None
        return RequestQuota(self, caller, f"{self._owner}/{next(self._numbers)}", on_refused)

    def remember(self, caller: Caller, rates: Sequence[RateUse], levels_s: Sequence[float]) -> None:
        """Remember how much of its rates a caller has left."""
        name = (caller.tenant, caller.key_id)
        self._seen[name] = _Seen(rates, levels_s, self.clock.monotonic())
        self._seen.move_to_end(name)
        if len(self._seen) > _MAX_REMEMBERED:
            self._seen.popitem(last=False)

    def gave_back(self, caller: Caller, rates: Sequence[RateUse], changes_s: Sequence[float]) -> None:
        """Remember that a caller has given this back of its rates."""
        seen = self._seen.get((caller.tenant, caller.key_id))
        if seen is not None:
            passed_s = self.clock.monotonic() - seen.at
            changes = {rate.name: change_s for rate, change_s in zip(rates, changes_s, strict=True)}
            pairs = zip(seen.rates, seen.levels_s, strict=True)
            levels_s = [max(0.0, max(0.0, level_s - passed_s) + changes.get(rate.name, 0.0)) for rate, level_s in pairs]
            self.remember(caller, seen.rates, levels_s)

    def rate_limits(self, caller: Caller) -> Sequence[RateLimit]:
        """The limits of requests and of tokens of which the caller has least left; none before its first request."""
        seen = self._seen.get((caller.tenant, caller.key_id))
        if seen is None:
            return ()
        passed_s, found = self.clock.monotonic() - seen.at, dict[str, RateLimit]()
        for rate, level_s in zip(seen.rates, seen.levels_s, strict=True):
            reset_s = max(0.0, level_s - passed_s)
            remaining = max(0, int(rate.limit * (1.0 - reset_s / rate.period_s) + 1e-3))
            kind = _kind(rate.name).partition("_")[0]
            if kind not in found or remaining < found[kind].remaining:
                found[kind] = RateLimit(kind, rate.limit, remaining, reset_s)
        return list(found.values())


class RequestQuota:
    """What one request takes, and gives back when it has ended."""

    def __init__(self, limiter: RateLimiter, caller: Caller, lease: str, on_refused: Callable[[str], None]) -> None:
        self._limiter = limiter
        self._caller = caller
        self._on_refused = on_refused
        self._use = QuotaUse(lease)
        self._taken_at = 0.0
        self._is_held = False
        self.num_paid: int | None = 0
        """So many of its tokens another call has paid for; None: all of them."""

    async def take(self, num_prompt: int, num_output: int, *, is_request: bool = True) -> None:
        """Take what a request may cost. `num_output`: the most tokens that it generates.

        `is_request`: it counts as one. Raises QuotaExceeded, QuotaTooSmall, and QuotaUnknown if nobody knows what is
        used.
        """
        rates = list(_rates(self._caller, num_prompt, num_output, is_request=is_request))
        for rate in rates:
            if rate.cost > rate.limit:
                self._on_refused(_kind(rate.name))
                why = f"this request has {num_prompt} tokens in its prompt alone: shorten it"
                raise QuotaTooSmall(f"{self._named(rate.name, rate.limit)}, and {why}")
        await self._take(rates, list(_rooms(self._caller)))

    async def resume(self) -> None:
        """Take a place for a stream that goes on, of which another call has paid all tokens (else set `num_paid`).

        It is never refused, since it was admitted before: tokens that nobody has paid are taken when they are known,
        and the place that it has at a router that died is free only when the lease expires.
        """
        self.num_paid = None
        rooms = [ConcurrencyUse(room.name, 0) for room in _rooms(self._caller)]
        with contextlib.suppress(QuotaUnknown):
            await self._take(list(_rates(self._caller, 0, 0, is_request=False)), rooms)

    def take_over(self, before: RequestQuota) -> None:
        """Give back at the end what an earlier stream of the same request has taken at this router for its tokens."""
        if before._is_held:
            self._use = replace(self._use, rates=before._use.rates)
            self._taken_at, self.num_paid = before._taken_at, before.num_paid

    def end(self, num_used: int | None) -> None:
        """The request has used so many tokens; None: it goes on elsewhere, for what was taken here. Idempotent."""
        if not self._is_held:
            return
        self._is_held = False
        is_known = num_used is not None and self.num_paid is not None
        num_own = max(0, (num_used or 0) - (self.num_paid or 0))
        since_s = self._limiter.clock.monotonic() - self._taken_at
        changes_s = [
            unused_s(rate, num_own, since_s) if is_known and _kind(rate.name).startswith("tokens") else 0.0
            for rate in self._use.rates
        ]
        self._limiter.store.give_back(self._use, changes_s)
        self._limiter.gave_back(self._caller, self._use.rates, changes_s)

    async def _take(self, rates: Sequence[RateUse], rooms: Sequence[ConcurrencyUse]) -> None:
        use = self._use = QuotaUse(self._use.lease, rates, rooms)
        self._taken_at = self._limiter.clock.monotonic()
        try:
            taken = await self._limiter.store.take(use)
        except Unreachable:
            # The message is for clients, which need not know where it is.
            self._on_refused("unreachable")
            raise QuotaUnknown("the registry does not say what is used of the quotas of this API key") from None
        self._limiter.remember(self._caller, rates, taken.levels_s)
        if taken.short_of is None:
            self._is_held = True
            return
        if taken.short_of >= len(rates):
            room = use.rooms[taken.short_of - len(rates)]
            self._on_refused("max_concurrent")
            raise QuotaExceeded(all_run(self._whose(room.name), room.limit), taken.wait_s)
        rate = rates[taken.short_of]
        self._on_refused(_kind(rate.name))
        why = f"this request may take {rate.cost:g} and has to wait for {taken.wait_s:.3g} s"
        raise QuotaExceeded(f"{self._named(rate.name, rate.limit)} are used, and {why}", taken.wait_s)

    def _named(self, name: str, limit: int) -> str:
        return f"{_kind(name)} of {self._whose(name)}: {limit} {_UNITS[_kind(name)]}"

    def _whose(self, name: str) -> str:
        return f"tenant {self._caller.tenant}" if name.startswith("tenant:") else "this API key"


def all_run(whose: str, limit: int) -> str:
    """Why a request beyond `max_concurrent` is refused."""
    return f"max_concurrent of {whose}: {limit} requests, as many as may, run"


_UNITS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "tokens_per_day": "tokens a day",
}


def _kind(name: str) -> str:
    """The limit of a bucket, by its name."""
    return name.rpartition(":")[2]


def _rates(caller: Caller, num_prompt: int, num_output: int, *, is_request: bool) -> Iterator[RateUse]:
    for owner, quotas in _quotas(caller):
        for kind, period_s in _PERIODS.items():
            if (limit := getattr(quotas, kind)) is None:
                continue
            most = min(num_prompt + num_output, limit)
            cost = float(is_request) if kind.startswith("requests") else max(num_prompt, most)
            yield RateUse(f"{owner}:{kind}", limit, period_s, cost)


def _rooms(caller: Caller) -> Iterator[ConcurrencyUse]:
    if caller.is_counted:
        yield ConcurrencyUse(f"tenant:{caller.tenant}", caller.max_concurrent or 0)
    if caller.key_quotas.max_concurrent is not None:
        yield ConcurrencyUse(f"key:{caller.key_id}", caller.key_quotas.max_concurrent)


def _quotas(caller: Caller) -> Sequence[tuple[str, Quotas]]:
    return (f"tenant:{caller.tenant}", caller.tenant_quotas), (f"key:{caller.key_id}", caller.key_quotas)

"""The totals that routers tell each other: for the live page over ten minutes, and for the shares of tenants.

Each router counts its own requests, publishes its totals in the registry and reads those of the others, so the page of
every router shows the whole cluster. Rates, failures and latencies are differences of totals between two samples. What
the totals say of tenants is for `router.admission.exchange`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from baton.errors import InvalidRequest, Unreachable
from baton.observe.metrics import Histogram
from baton.registry import Membership
from router.admission.exchange import MAX_ENTRIES, ChargedTotal, LedgerExchange
from router.flight.flight_table import AttemptCause
from router.listeners import Listeners
from router.live_requests import LiveRequests
from router.timers import Timers, sleep_until

EXCHANGE_EVERY_S = 1.0
SAMPLE_EVERY_S = 2 * EXCHANGE_EVERY_S
"""One exchange of two is a sample of the history."""
NUM_SAMPLES = 301
"""Ten minutes, both ends included."""
RATE_S = 10.0
"""Rates are means of the last so many seconds."""
LATENCY_S = 60.0
"""Latencies are those of the last so many seconds, except in the history, where they are those of `RATE_S`."""
MAX_BYTES = 4096 + 160 * MAX_ENTRIES
"""Size of the totals of one router as JSON."""
MAX_ROUTERS = 64
_MAX_BUCKETS = 64

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Counts = Annotated[tuple[_Count, ...], Field(min_length=2, max_length=_MAX_BUCKETS)]


@dataclass(frozen=True, slots=True)
class RouterTotals:
    """What one router has counted since its start, and what it serves now."""

    name: Annotated[str, Field(max_length=64)]
    incarnation: Annotated[str, Field(max_length=256)]
    tokens: _Count = 0
    """Generated tokens, also of requests that still run."""
    requests: _Count = 0
    """Accepted requests."""
    failed: _Count = 0
    """Accepted requests that failed, without those that their client cancelled."""
    cancelled: _Count = 0
    retried: _Count = 0
    """Attempts after the first one of a request."""
    running: _Count = 0
    waiting: _Count = 0
    """Requests that wait for a node."""
    ttft: _Counts = (0, 0)
    """Requests by the bucket of their time to first token, see `Buckets`."""
    gaps: _Counts = (0, 0)
    """Times between tokens, by bucket."""
    charged: Annotated[tuple[ChargedTotal, ...], Field(max_length=MAX_ENTRIES)] = ()
    """What its tenants were charged."""

    def to_json(self) -> bytes:
        return _TOTALS.dump_json(self)

    @staticmethod
    def from_json(data: bytes) -> RouterTotals:
        """Reads what a router has published; raises InvalidRequest."""
        if len(data) > MAX_BYTES:
            raise InvalidRequest("totals", f"{len(data)} bytes, more than {MAX_BYTES}")
        try:
            return _TOTALS.validate_json(data)
        except ValidationError as error:
            raise InvalidRequest("totals", str(error).splitlines()[0]) from None


_TOTALS = TypeAdapter(RouterTotals)


@dataclass(frozen=True, slots=True)
class Buckets:
    """The upper bounds of the buckets of latencies in seconds; the last one is infinite."""

    ttft: Sequence[float]
    gaps: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Sample:
    time: float
    """Seconds since the epoch."""
    routers: Mapping[str, RouterTotals]
    """By incarnation."""


class LiveHistory:
    """A ring of samples, one each `SAMPLE_EVERY_S`. Belongs to the event loop."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._samples: deque[_Sample] = deque(maxlen=NUM_SAMPLES)
        self._points: deque[dict[str, float | None]] = deque(maxlen=NUM_SAMPLES)

    def add(self, time: float, routers: Iterable[RouterTotals]) -> None:
        """Adds the totals of all routers at a time, without what tenants were charged. Totals with other buckets than
        ours, of another version, are left out."""
        fitting = [replace(router, charged=()) for router in routers if self._fits(router)][:MAX_ROUTERS]
        if self._samples and time <= self._samples[-1].time:
            # The clock was set back: what was sampled before cannot be put in order with what follows.
            self._samples.clear()
            self._points.clear()
        self._samples.append(_Sample(time, {router.incarnation: router for router in fitting}))
        self._points.append(self._point())

    def totals(self) -> dict[str, Any]:
        """The cluster's figures now: rates, latencies in milliseconds, and counts of the whole history."""
        latest = self._samples[-1].routers.values() if self._samples else ()
        recent, counted = self._since(LATENCY_S), self._since(NUM_SAMPLES * SAMPLE_EVERY_S)
        return {
            "running": sum(router.running for router in latest),
            "waiting": sum(router.waiting for router in latest),
            **_rates(self._since(RATE_S)),
            **{name: counted.total(name) for name in ("failed", "cancelled", "retried")},
            **self._quantiles("ttft", recent, (0.5, 0.99)),
            **self._quantiles("gaps", recent, (0.5, 0.99)),
            "counted_s": round(counted.seconds),
        }

    def routers(self) -> list[dict[str, Any]]:
        """The figures of each router, by name."""
        if not self._samples:
            return []
        rated, recent = self._since(RATE_S), self._since(LATENCY_S)
        counted = self._since(NUM_SAMPLES * SAMPLE_EVERY_S)
        return [
            {
                "name": router.name,
                "incarnation": router.incarnation,
                "running": router.running,
                "waiting": router.waiting,
                **_rates(rated, router.incarnation),
                **{name: counted.total(name, router.incarnation) for name in ("failed", "cancelled")},
                **self._quantiles("ttft", recent, (0.5,), router.incarnation),
                **self._quantiles("gaps", recent, (0.5,), router.incarnation),
            }
            for router in sorted(
                self._samples[-1].routers.values(), key=lambda router: (router.name, router.incarnation)
            )
        ]

    def columns(self) -> dict[str, list[float | None]]:
        """The history, the oldest first: `age_s` of each point before the latest, and the values at each."""
        if not self._samples:
            return {}
        end = self._samples[-1].time
        columns: dict[str, list[float | None]] = {"age_s": [round(end - sample.time, 1) for sample in self._samples]}
        for name in self._points[-1]:
            columns[name] = [point[name] for point in self._points]
        return columns

    def _fits(self, totals: RouterTotals) -> bool:
        return (len(totals.ttft), len(totals.gaps)) == (len(self._buckets.ttft), len(self._buckets.gaps))

    def _point(self) -> dict[str, float | None]:
        latest, recent = self._samples[-1].routers.values(), self._since(RATE_S)
        return {
            **_rates(recent),
            "running": sum(router.running for router in latest),
            "waiting": sum(router.waiting for router in latest),
            **self._quantiles("ttft", recent, (0.5,)),
            **self._quantiles("gaps", recent, (0.5,)),
        }

    def _quantiles(
        self, name: str, recent: _Increase, shares: Sequence[float], incarnation: str | None = None
    ) -> dict[str, float | None]:
        bounds, counts = getattr(self._buckets, name), recent.counts(name, incarnation)
        quantiles = {f"{name}_p{round(100 * share)}_ms": quantile(bounds, counts, share) for share in shares}
        return {key: None if value is None else round(1e3 * value, 1) for key, value in quantiles.items()}

    def _since(self, seconds: float) -> _Increase:
        """What was counted since the first sample that is at most so old."""
        if not self._samples:
            return _Increase({}, 0.0)
        # Half an interval of tolerance, since samples are never exactly on time.
        oldest = self._samples[-1].time - seconds - SAMPLE_EVERY_S / 2
        return _Increase.over([sample for sample in self._samples if sample.time >= oldest])


@dataclass(frozen=True, slots=True)
class _Increase:
    """The increase of totals over a stretch of time."""

    changes: Mapping[str, tuple[RouterTotals, RouterTotals]]
    """The first and the last totals of each router that was seen meanwhile, by incarnation."""
    seconds: float

    @staticmethod
    def over(samples: Sequence[_Sample]) -> _Increase:
        """The increase from the first sample to the last. Totals of an incarnation never fall."""
        first: dict[str, RouterTotals] = {}
        last: dict[str, RouterTotals] = {}
        for sample in samples:
            last |= sample.routers
            first = {**sample.routers, **first}
        seconds = samples[-1].time - samples[0].time if samples else 0.0
        return _Increase({key: (first[key], new) for key, new in last.items()}, seconds)

    def total(self, name: str, incarnation: str | None = None) -> int:
        """The increase of one number, of one router or of all."""
        return sum(max(0, getattr(new, name) - getattr(old, name)) for old, new in self._of(incarnation))

    def counts(self, name: str, incarnation: str | None = None) -> list[int]:
        """The increase of each bucket, summed over routers; empty if there is none."""
        changes = [(getattr(old, name), getattr(new, name)) for old, new in self._of(incarnation)]
        increases = [[max(0, more - less) for less, more in zip(old, new, strict=True)] for old, new in changes]
        return [sum(column) for column in zip(*increases, strict=True)]

    def _of(self, incarnation: str | None) -> Iterable[tuple[RouterTotals, RouterTotals]]:
        if incarnation is None:
            return self.changes.values()
        return [self.changes[incarnation]] if incarnation in self.changes else []


def _rates(rated: _Increase, incarnation: str | None = None) -> dict[str, float | None]:
    """Tokens and requests per second; None if there is only one sample."""
    return {
        f"{name}_per_s": round(rated.total(name, incarnation) / rated.seconds, 2) if rated.seconds else None
        for name in ("tokens", "requests")
    }


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """A quantile of values that were counted in buckets, as Prometheus' histogram_quantile; None without values.

    Values are taken to be spread evenly in a bucket; those of the last, infinite one count as its lower bound.
    """
    left = share * sum(counts)
    if not left:
        return None
    lower = 0.0
    for upper, count in zip(bounds, counts, strict=False):
        if count and left <= count:
            return lower if upper == bounds[-1] else lower + (upper - lower) * left / count
        left -= count
        if upper != bounds[-1]:
            lower = upper
    return lower


_log = logging.getLogger(__name__)


def router_totals(requests: LiveRequests, name: str, incarnation: str) -> RouterTotals:
    """What this router has counted, for one exchange."""
    counters, served = requests.counters, requests.counters.served
    return RouterTotals(
        name=name,
        incarnation=incarnation,
        tokens=served.generation_tokens + requests.num_live_tokens,
        requests=counters.accepted,
        failed=counters.failed,
        cancelled=counters.errors["Cancelled"],
        retried=counters.attempts.total() - counters.attempts[AttemptCause.FIRST],
        running=requests.num_live - requests.num_waiting,
        waiting=requests.num_waiting,
        ttft=served.ttft.counts,
        gaps=served.gaps.counts,
        charged=requests.exchange.next_totals(),
    )


def buckets_of(ttft: Histogram, gaps: Histogram) -> Buckets:
    """The buckets of a router's latencies."""
    return Buckets(ttft.bounds, gaps.bounds)


class LiveTotals:
    """Exchanges totals with all other routers, while this router runs. Belongs to the event loop."""

    def __init__(
        self,
        membership: Membership,
        timers: Timers,
        wall: Callable[[], float],
        own: Callable[[], RouterTotals],
        history: LiveHistory,
        exchange: LedgerExchange,
    ) -> None:
        """`wall`: seconds since the epoch. `own`: this router's totals. `exchange` takes what others have charged."""
        self._membership = membership
        self._timers = timers
        self._wall = wall
        self._own = own
        self._exchange = exchange
        self._routers: list[str] = []
        self.history = history
        self.on_totals: Listeners[Sequence[RouterTotals]] = Listeners()
        """Called with the totals of all routers after each exchange, this router's first."""

    def registered_routers(self, incarnations: Iterable[str]) -> None:
        """Take the incarnations of the routers that are in the registry now."""
        self._routers = sorted(incarnations)[:MAX_ROUTERS]

    async def run(self) -> None:
        """Exchange totals every `EXCHANGE_EVERY_S`, and sample each second time, until cancelled."""
        is_sample = True
        while True:
            if is_sample:
                await self.sample()
            else:
                await self.exchange()
            is_sample = not is_sample
            await sleep_until(self._timers, self._timers.monotonic() + EXCHANGE_EVERY_S)

    async def sample(self) -> None:
        """Exchange totals, and add them to the history; while Redis is away, this router's alone."""
        self.history.add(self._wall(), await self.exchange())

    async def exchange(self) -> Sequence[RouterTotals]:
        """Publish this router's totals, and take what others have charged. Returns the totals of all."""
        own = self._own()
        names = [name for name in self._routers if name != own.incarnation]
        try:
            published = await self._membership.exchange_totals(own.incarnation, own.to_json(), names)
        except Unreachable:
            published = {}
        others = list(_readable(published))
        self._exchange.take_all({router.incarnation: router.charged for router in others})
        totals = [own, *others]
        self.on_totals(totals)
        return totals


def _readable(published: Mapping[str, bytes]) -> Iterable[RouterTotals]:
    for incarnation, data in published.items():
        try:
            totals = RouterTotals.from_json(data)
        except InvalidRequest as error:
            _log.debug("the live page shows no figures of router %s: %s", incarnation, error)
            continue
        if totals.incarnation == incarnation:
            yield totals

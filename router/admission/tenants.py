"""Counts the requests of each tenant, and refuses those beyond its quotas and those of its keys (`quotas`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from types import TracebackType

from baton.errors import QuotaExceeded
from baton.messages.generation import GenerateEvent
from baton.observe.metrics import Figure
from baton.security.matrix import Caller
from router.admission.quotas import RateLimit, RateLimiter, RequestQuota, all_run
from router.admission.tenant_figures import TenantLabels


class Tenants:
    """The tenants of one router. Operators choose their names, which are no secret; keys are not known here."""

    def __init__(self, *, labels: TenantLabels | None = None, limiter: RateLimiter | None = None) -> None:
        """`labels`: those of all metrics by tenant."""
        self._limiter = limiter or RateLimiter()
        self._running: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._refused: Counter[tuple[str, str]] = Counter()
        """By label and reason."""
        self._labels = TenantLabels() if labels is None else labels

    def counted(
        self,
        caller: Caller,
        begin: Callable[[Callable[[], None], RequestQuota | None], AsyncGenerator[GenerateEvent, None]],
    ) -> AsyncGenerator[GenerateEvent, None]:
        """The events of a request, which counts as running until it has ended well, or they are closed.

        `begin` makes the events. Its first argument is to be called when all of them are taken and the request ended
        well; by the second one it takes the quotas of its tenant and key, None: there are none. Raises QuotaExceeded,
        before the request begins, if its tenant has as many running here as it may have anywhere.
        """
        tenant, label = caller.tenant, self._labels.of(caller.tenant)
        if caller.max_concurrent is not None and self._running[tenant] >= caller.max_concurrent:
            self._refused[label, "max_concurrent"] += 1
            raise QuotaExceeded(all_run(f"tenant {tenant}", caller.max_concurrent))
        place = _Place(lambda: self._request_over(tenant))
        events = begin(place.give_back, self._limiter.open(caller, lambda why: self._refuse(label, why)))
        self._accepted[label] += 1
        self._running[tenant] += 1
        return _Counted(events, place)

    def rate_limits(self, caller: Caller) -> Sequence[RateLimit]:
        """What a caller has left of its quotas; see `RateLimiter.rate_limits`."""
        return self._limiter.rate_limits(caller)

    def figures(self) -> Iterator[Figure]:
        """The metrics, by tenant."""
        running: Counter[str] = Counter()
        for tenant, count in self._running.items():
            running[self._labels.of(tenant)] += count
        for name, text, counts in (
            ("tenant_requests_total", "Requests by tenant.", self._accepted),
            ("tenant_requests_running", "Requests that run now, by tenant.", running),
        ):
            for label in self._labels:
                yield Figure(name, text, counts[label], {"tenant": label})
        text = "Requests beyond a quota of the tenant or of its API key, by the quota."
        for (label, why), count in sorted(self._refused.items()):
            yield Figure("tenant_requests_refused_total", text, count, {"tenant": label, "why": why})

    def _refuse(self, label: str, why: str) -> None:
        self._refused[label, why] += 1

    def _request_over(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]


class _Place:
    """The place of one request among those that its tenant may have running."""

    __slots__ = ("_on_free",)

    def __init__(self, on_free: Callable[[], None]) -> None:
        self._on_free: Callable[[], None] | None = on_free

    def give_back(self) -> None:
        """Let another request have the place. Idempotent."""
        on_free, self._on_free = self._on_free, None
        if on_free is not None:
            on_free()


class _Counted(AsyncGenerator[GenerateEvent, None]):
    """Wraps a generator and gives the place back when it is closed. Adds no step of its own to any event."""

    def __init__(self, events: AsyncGenerator[GenerateEvent, None], place: _Place) -> None:
        self._events = events
        self._place = place

    def __anext__(self) -> Awaitable[GenerateEvent]:  # type: ignore[override]
        return self._events.__anext__()

    async def asend(self, value: None) -> GenerateEvent:
        return await self._events.asend(value)

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> GenerateEvent:
        return await self._events.athrow(kind, value, trace)  # type: ignore[arg-type]

    async def aclose(self) -> None:
        self._place.give_back()
        await self._events.aclose()

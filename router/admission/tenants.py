"""How much each tenant asks for, and when that is enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from types import TracebackType

from baton.errors import QuotaExceeded
from baton.messages.generation import GenerateEvent
from baton.observe.metrics import Figure
from baton.security.callers import Caller

MAX_LABELS = 50
"""Tenants that have figures of their own; the others, in the order in which they came, share one."""
OTHERS = "other"


class Tenants:
    """Of one router. A name is an operator's choice and no secret; of keys nothing is known here."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._labels: set[str] = set()

    def counted(
        self, caller: Caller, begin: Callable[[], AsyncGenerator[GenerateEvent, None]]
    ) -> AsyncGenerator[GenerateEvent, None]:
        """The events of one more request, which counts until they are closed; raises QuotaExceeded before it begins."""
        tenant, label = caller.tenant, self._label(caller.tenant)
        if caller.max_concurrent is not None and self._running[tenant] >= caller.max_concurrent:
            self._refused[label] += 1
            raise QuotaExceeded(f"{caller.max_concurrent} requests of {tenant} run, and no more may at once")
        events = begin()
        self._asked[label] += 1
        self._running[tenant] += 1
        return _Counted(events, lambda: self._leave(tenant))

    def figures(self) -> Iterator[Figure]:
        """By tenant, as far as there are labels."""
        running: Counter[str] = Counter()
        for tenant, count in self._running.items():
            running[self._label(tenant)] += count
        for name, text, counts in (
            ("tenant_requests_total", "Requests by tenant.", self._asked),
            ("tenant_requests_running", "Requests that run now, by tenant.", running),
            ("tenant_requests_refused_total", "Requests beyond what the tenant may have at once.", self._refused),
        ):
            for label in sorted(self._labels):
                yield Figure(name, text, counts[label], {"tenant": label})

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def _label(self, tenant: str) -> str:
        if tenant in self._labels:
            return tenant
        label = tenant if len(self._labels) < MAX_LABELS else OTHERS
        self._labels.add(label)
        return label


class _Counted(AsyncGenerator[GenerateEvent, None]):
    """Another generator, and a word when it is closed. Adds no step of its own to any event."""

    def __init__(self, events: AsyncGenerator[GenerateEvent, None], leave: Callable[[], None]) -> None:
        self._events = events
        self._leave: Callable[[], None] | None = leave

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
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
        await self._events.aclose()

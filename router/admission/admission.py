"""The queue in front of placement: which requests wait, in which order, and which are turned away.

Pure: the clock is an argument. The rules:

1. A node without room (`router.placement.room`) gets no new request.
2. A request that finds no node, or only full ones, waits; there is one queue for both (and another one for embeddings,
   see `waiting_room`). First come requests that were placed before and lost their nodes: their clients are in
   mid-stream. Of the others each tenant gets its share (`ledger`). Those of one tenant are ordered by priority, and
   waiting makes up for priority as on the nodes, so that no request starves.
3. The queue is bounded. When it is full, the tenant gives way that has most requests in it for its weight, by its
   newest request of the lowest priority. If that is the tenant of a new request which is no more urgent, the new one is
   refused.
4. A request that is predicted to miss its deadline, its time to first token or its time per token is refused at once,
   so that its client can go elsewhere. Only times that this router has measured count, and of those the best ones. An
   idle node is always worth a try: a slow pace counts only while requests show it, so that a bad measurement does not
   turn away the requests that would correct it.
5. A request that is turned away is told to come again when the queue of its tenant is predicted to be empty, each at a
   slightly different time. What is predicted for a tenant is what its share of the departures gives it.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from random import Random
from typing import Generic, TypeVar

from baton.errors import QueueFull, WouldBeLate
from baton.values import value
from router.admission.ledger import TenantLedger

_RECENT = 64
"""The number of latest requests whose times are kept."""
_OF_LATE_S = 60.0
"""For so long the pace of an ended request counts as a prediction for an idle node."""
_SHORTEST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0

T = TypeVar("T")


@value(frozen=True, slots=True)
class LatencyTargets:
    """The times that a request has to keep; None: there is no such target."""

    deadline: float | None = None
    """When the client stops waiting, in seconds on the router's clock."""
    first_token_by: float | None = None
    """When the first token is due, in seconds on the router's clock."""
    least_tokens: int = 1
    """The least number of tokens that the request generates."""
    token_s: float | None = None
    """Limit of the mean time per token after the first, in seconds."""


NO_TARGETS = LatencyTargets()


class Ticket(Generic[T]):
    """A request's place in the queue; made by `AdmissionQueue.ticket`, and in the queue once it was added."""

    __slots__ = ("arrived", "class_key", "is_retry", "item", "order_key", "priority", "targets", "tenant")

    def __init__(
        self,
        item: T,
        number: int,
        arrived: float,
        priority: int,
        rank: float,
        targets: LatencyTargets,
        *,
        is_retry: bool,
        tenant: str,
    ) -> None:
        self.item = item
        self.tenant = tenant
        self.arrived = arrived
        self.priority = priority
        self.targets = targets
        self.is_retry = is_retry
        """Whether the request was placed before, and lost its nodes."""
        self.order_key = (not is_retry, rank, arrived, number)
        self.class_key = (priority, number)


class ServiceTimes:
    """The times that the latest requests took from their placement on, in seconds."""

    def __init__(self) -> None:
        self._service: deque[float] = deque(maxlen=_RECENT)
        self._first_token: deque[float] = deque(maxlen=_RECENT)
        self._per_token: deque[float] = deque(maxlen=_RECENT)
        self._paced_at = -math.inf

    def add(self, first_token_s: float, service_s: float, num_tokens: int, now: float = 0.0) -> None:
        """Note the times of a request that ended well at `now`."""
        self._service.append(service_s)
        self._first_token.append(first_token_s)
        if num_tokens > 1:
            self._paced_at = now
            self._per_token.append((service_s - first_token_s) / (num_tokens - 1))

    def wait_s(self, num_ahead: int, num_running: int) -> float:
        """The time until so many requests and one more have been placed, by Little's law; 0 while nothing is known."""
        if not self._service or not num_running:
            return 0.0
        return (num_ahead + 1) * sum(self._service) / len(self._service) / num_running

    def first_token_s(self) -> float:
        """The shortest time to first token of the latest requests; 0 while nothing is known."""
        return min(self._first_token, default=0.0)

    def token_s(self) -> float:
        """The shortest mean time per token of the latest requests; 0 while nothing is known."""
        return min(self._per_token, default=0.0)

    def pace_s(self, now: float) -> float:
        """The same; 0 also if no request has shown it for a while."""
        return self.token_s() if now - self._paced_at <= _OF_LATE_S else 0.0


class _Line(Generic[T]):
    """The requests of one tenant that wait and may be displaced."""

    __slots__ = ("by_class", "order")

    def __init__(self) -> None:
        self.order: list[Ticket[T]] = []
        self.by_class: list[Ticket[T]] = []
        """The last one is the first to give way."""

    def __len__(self) -> int:
        return len(self.order)


class AdmissionQueue(Generic[T]):
    """The requests that wait for nodes, in the order in which they are tried."""

    def __init__(self, max_waiting: int, ageing_s: float, rng: Random, ledger: TenantLedger | None = None) -> None:
        """`ageing_s`: how many seconds of waiting weigh as much as one step of priority; 0: none ever do."""
        self.times = ServiceTimes()
        self.ledger = ledger or TenantLedger()
        self._max_waiting = max_waiting
        self._ageing_s = ageing_s
        self._rng = rng
        self._retries: list[Ticket[T]] = []
        """Requests that were placed before."""
        self._lines: dict[str, _Line[T]] = {}
        """By tenant; none is empty."""
        self._num_new = 0
        """The number of requests in all lines."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._retries) + self._num_new

    def ticket(
        self,
        item: T,
        arrived: float,
        priority: int,
        targets: LatencyTargets,
        *,
        is_retry: bool = False,
        tenant: str = "",
    ) -> Ticket[T]:
        """Make a ticket, which `add` puts into the queue."""
        self._count += 1
        # All requests age alike, so the order of two never changes while they wait.
        rank = arrived + self._ageing_s * priority if self._ageing_s else float(priority)
        return Ticket(item, self._count, arrived, priority, rank, targets, is_retry=is_retry, tenant=tenant)

    def first(self) -> Ticket[T] | None:
        """The next request, if any waits."""
        if self._retries:
            return self._retries[0]
        tenant = self.ledger.first()
        return None if tenant is None else self._lines[tenant].order[0]

    def is_next(self, ticket: Ticket[T]) -> bool:
        """Whether no request in the queue is ahead of it."""
        if self._retries or ticket.is_retry:
            return not self._retries or ticket.order_key <= self._retries[0].order_key
        line = self._lines.get(ticket.tenant)
        if line is not None and line.order[0].order_key < ticket.order_key:
            return False
        return self.ledger.is_first(ticket.tenant)

    def check_room(self, priority: int, num_running: int, tenant: str = "") -> None:
        """Raises QueueFull if a newcomer of this priority could not wait now."""
        if self._num_new >= self._max_waiting and self._gives_way(priority, tenant) is None:
            why = f"{self._num_new} requests wait, as many as may, and none is less urgent"
            raise QueueFull(why, self.retry_after_s(num_running, tenant))

    def add(self, ticket: Ticket[T], now: float, num_running: int) -> Ticket[T] | None:
        """Put a ticket into the queue. Returns the one that gave way to it, if any; raises QueueFull or WouldBeLate."""
        if ticket.is_retry:
            bisect.insort(self._retries, ticket, key=_order_key)
            return None
        self.check_room(ticket.priority, num_running, ticket.tenant)
        line = self._lines.get(ticket.tenant)
        num_before = bisect.bisect(line.order, ticket.order_key, key=_order_key) if line is not None else 0
        first_token_s = self._wait_s(ticket.tenant, num_before, num_running) + self.times.first_token_s()
        self.check_in_time(ticket.targets, now, first_token_s, self.times.token_s(), num_running, ticket.tenant)
        self.check_pace(ticket.targets, self.times.pace_s(now), num_running, ticket.tenant)
        displaced = None
        if self._num_new >= self._max_waiting and (displaced := self._gives_way(ticket.priority, ticket.tenant)):
            self.remove(displaced)
        line = self._lines.get(ticket.tenant)
        if line is None:
            line = self._lines[ticket.tenant] = _Line()
            self.ledger.begin_waiting(ticket.tenant)
        bisect.insort(line.order, ticket, key=_order_key)
        bisect.insort(line.by_class, ticket, key=_class_key)
        self._num_new += 1
        return displaced

    def remove(self, ticket: Ticket[T]) -> None:
        """Take a ticket out of the queue. Idempotent."""
        if ticket.is_retry:
            _remove_at(self._retries, ticket, bisect.bisect_left(self._retries, ticket.order_key, key=_order_key))
            return
        line = self._lines.get(ticket.tenant)
        if line is None:
            return
        num_before = len(line)
        _remove_at(line.order, ticket, bisect.bisect_left(line.order, ticket.order_key, key=_order_key))
        _remove_at(line.by_class, ticket, bisect.bisect_left(line.by_class, ticket.class_key, key=_class_key))
        self._num_new -= num_before - len(line)
        if not line:
            del self._lines[ticket.tenant]
            self.ledger.end_waiting(ticket.tenant)

    def retry_after_s(self, num_running: int, tenant: str = "") -> float:
        """After how many seconds a request of a tenant that is turned away now should come again."""
        line = self._lines.get(tenant)
        drained_s = self._wait_s(tenant, len(line) if line is not None else 0, num_running)
        return min(max(drained_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S) * self._rng.uniform(0.75, 1.25)

    def _wait_s(self, tenant: str, num_before: int, num_running: int) -> float:
        """How long a request waits that has so many of its tenant before it: the others take their shares meanwhile."""
        weight = self.ledger.weight(tenant)
        of_all = self.ledger.waiting_weight + (0.0 if tenant in self._lines else weight)
        return self.times.wait_s(len(self._retries) + num_before, num_running) * of_all / weight

    def _gives_way(self, priority: int, tenant: str) -> Ticket[T] | None:
        """The request that gives way to a new one; None: none does."""
        if not self._lines:
            return None

        def requests_by_weight(name: str) -> float:
            return (len(self._lines[name]) + (name == tenant)) / self.ledger.weight(name)

        longest = max(self._lines, key=requests_by_weight)
        last = self._lines[longest].by_class[-1]
        own = (len(self._lines[tenant]) if tenant in self._lines else 0) + 1
        if longest != tenant and requests_by_weight(longest) > own / self.ledger.weight(tenant):
            return last
        line = self._lines.get(tenant)
        return line.by_class[-1] if line is not None and line.by_class[-1].priority > priority else None

    def check_in_time(
        self,
        targets: LatencyTargets,
        now: float,
        first_token_s: float,
        token_s: float,
        num_running: int,
        tenant: str = "",
    ) -> None:
        """Raises WouldBeLate if tokens come too late: the first after `first_token_s`, then one per `token_s`."""
        last_token_s = first_token_s + (targets.least_tokens - 1) * token_s
        why = ""
        if targets.first_token_by is not None and now + first_token_s > targets.first_token_by:
            why = f"its first token is predicted in {first_token_s:.3f} s, after the time that it allows"
        elif targets.deadline is not None and now + last_token_s > targets.deadline:
            why = f"its end is predicted in {last_token_s:.3f} s or later, after its deadline"
        if why:
            raise WouldBeLate(why, self.retry_after_s(num_running, tenant))

    def check_pace(self, targets: LatencyTargets, token_s: float, num_running: int, tenant: str = "") -> None:
        """Raises WouldBeLate if a token every `token_s` seconds is slower than the target."""
        if targets.token_s is not None and token_s > targets.token_s:
            why = f"a token is predicted every {token_s * 1e3:.3g} ms, and it allows {targets.token_s * 1e3:.3g} ms"
            raise WouldBeLate(why, self.retry_after_s(num_running, tenant))


def _order_key(ticket: Ticket[T]) -> tuple[bool, float, float, int]:
    return ticket.order_key


def _class_key(ticket: Ticket[T]) -> tuple[int, int]:
    return ticket.class_key


def _remove_at(tickets: list[Ticket[T]], ticket: Ticket[T], position: int) -> None:
    if position < len(tickets) and tickets[position] is ticket:
        del tickets[position]

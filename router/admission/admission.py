"""The queue in front of placement: which requests wait, in which order, and which are turned away.

Pure: the clock is an argument. The rules:

1. A node without room (`router.placement.room`) gets no new request.
2. A request that finds no node, or only full ones, waits; there is one queue for both (and another one for embeddings,
   see `waiting_room`). First come requests that were placed before and lost their nodes: their clients are in
   mid-stream. Then come those of the most urgent class (`ServiceClass`), of which each tenant gets its share
   (`ledger`). Those of one tenant are ordered by priority, and waiting makes up for priority as on the nodes, so that
   none of them starves. While urgent and normal requests wait, the urgent ones get no more than a share of the tokens
   (`urgent_share`); batch requests get what nobody else wants.
3. The queue is bounded. When it is full, requests of a less urgent class give way, and then those of the same one: of
   the tenant that has most requests there for its weight the newest one of the lowest priority. If that is the tenant
   of a new request which is no more urgent, the new one is refused. Of the queue, too, urgent requests hold no more
   than their share against normal ones.
4. A request that is predicted to miss its deadline, its time to first token or its time per token is refused at once,
   so that its client can go elsewhere. Only times that this router has measured count, and of those the best ones. An
   idle node is always worth a try: a slow pace counts only while requests show it, so that a bad measurement does not
   turn away the requests that would correct it.
5. A request that is turned away is told to come again when the queue of its tenant is predicted to be empty, each at a
   slightly different time. What is predicted for a tenant is what its share of the departures gives it.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import deque
from collections.abc import Mapping
from random import Random
from typing import Generic, TypeVar

from baton.errors import QueueFull, WouldBeLate
from baton.values import value
from router.admission.ledger import TenantLedger
from router.admission.service_class import ServiceClass, UrgentShare
from router.admission.turns import Turns

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

    __slots__ = (
        "arrived",
        "is_retry",
        "item",
        "order_key",
        "priority",
        "priority_key",
        "service_class",
        "targets",
        "tenant",
        "weight",
    )

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
        service_class: ServiceClass,
        weight: float,
    ) -> None:
        self.item = item
        self.tenant = tenant
        self.weight = weight
        """The tenant's weight."""
        self.service_class = service_class
        self.arrived = arrived
        self.priority = priority
        self.targets = targets
        self.is_retry = is_retry
        """Whether the request was placed before, and lost its nodes."""
        self.order_key = (not is_retry, rank, arrived, number)
        self.priority_key = (priority, number)


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

    def wait_s(self, num_ahead: float, num_running: int) -> float:
        """The time until so many requests and one more have been placed, by Little's law; 0 while nothing is known."""
        if not self._service or not num_running:
            return 0.0
        return (num_ahead + 1) * self.request_s() / num_running

    def request_s(self) -> float:
        """The mean time of the latest requests; 0 while nothing is known."""
        return sum(self._service) / len(self._service) if self._service else 0.0

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
    """The requests of one tenant and class that wait and may be displaced."""

    __slots__ = ("by_priority", "number", "order", "relative_length")

    def __init__(self, number: int) -> None:
        self.number = number
        """Grows with the time at which the tenant began to wait."""
        self.relative_length = 0.0
        """The number of its requests, divided by the tenant's weight."""
        self.order: list[Ticket[T]] = []
        self.by_priority: list[Ticket[T]] = []
        """The last one is the first to give way."""

    def __len__(self) -> int:
        return len(self.order)


class _Class(Generic[T]):
    """The waiting requests of one class."""

    def __init__(self, output_weight: float) -> None:
        self.ledger = TenantLedger(output_weight)
        self.turns = Turns()
        self.lines: dict[str, _Line[T]] = {}
        """By tenant; none is empty."""
        self._longest: list[tuple[float, int, str]] = []
        """A heap of (-relative length, number of the line, tenant). Entries are left in it when they no longer hold,
        and skipped when they come first."""
        self._numbers = itertools.count(1)
        self.num_requests = 0

    def add(self, ticket: Ticket[T]) -> None:
        line = self.lines.get(ticket.tenant)
        if line is None:
            line = self.lines[ticket.tenant] = _Line(next(self._numbers))
            self.ledger.begin_waiting(ticket.tenant, ticket.weight)
        else:
            self.ledger.set_weight(ticket.tenant, ticket.weight)
        bisect.insort(line.order, ticket, key=_order_key)
        bisect.insort(line.by_priority, ticket, key=_priority_key)
        self.num_requests += 1
        self._note_length(ticket.tenant, line)

    def remove(self, ticket: Ticket[T]) -> int:
        """Returns how many requests were removed. Idempotent."""
        line = self.lines.get(ticket.tenant)
        if line is None:
            return 0
        num_before = len(line)
        _remove_at(line.order, ticket, bisect.bisect_left(line.order, ticket.order_key, key=_order_key))
        _remove_at(
            line.by_priority, ticket, bisect.bisect_left(line.by_priority, ticket.priority_key, key=_priority_key)
        )
        num_removed = num_before - len(line)
        self.num_requests -= num_removed
        if not line:
            del self.lines[ticket.tenant]
            self.ledger.end_waiting(ticket.tenant)
        elif num_removed:
            self._note_length(ticket.tenant, line)
        return num_removed

    def _note_length(self, tenant: str, line: _Line[T]) -> None:
        """Put a line whose length has changed into its place among the longest."""
        line.relative_length = len(line) / self.ledger.weight(tenant)
        heapq.heappush(self._longest, (-line.relative_length, line.number, tenant))
        if len(self._longest) > 4 * len(self.lines) + 64:
            self._longest = [(-each.relative_length, each.number, name) for name, each in self.lines.items()]
            heapq.heapify(self._longest)

    def _longest_line(self) -> _Line[T]:
        """The line that is longest for its tenant's weight; of equal ones the oldest. There must be one."""
        while True:
            length, number, tenant = self._longest[0]
            line = self.lines.get(tenant)
            if line is not None and (line.number, -line.relative_length) == (number, length):
                return line
            heapq.heappop(self._longest)

    def first(self) -> Ticket[T] | None:
        tenant = self.ledger.first()
        return None if tenant is None else self.lines[tenant].order[0]

    def is_next(self, ticket: Ticket[T]) -> bool:
        """Whether no request of the class is ahead of it."""
        line = self.lines.get(ticket.tenant)
        if line is not None and line.order[0].order_key < ticket.order_key:
            return False
        return self.ledger.is_first(ticket.tenant)

    def num_of(self, tenant: str) -> int:
        line = self.lines.get(tenant)
        return 0 if line is None else len(line)

    def num_ahead(self, ticket: Ticket[T]) -> int:
        """How many requests of its tenant come before this one."""
        line = self.lines.get(ticket.tenant)
        return 0 if line is None else bisect.bisect_left(line.order, ticket.order_key, key=_order_key)

    def times_as_long(self, tenant: str) -> float:
        """How many times as long a tenant waits for a number of its own requests as if it were alone."""
        weight = self.ledger.weight(tenant)
        return (self.ledger.waiting_weight + (0.0 if tenant in self.lines else weight)) / weight

    def gives_way(self, newcomer: str | None, priority: int) -> Ticket[T] | None:
        """The request that gives way to one of a tenant; None: none does. Newcomer None: it is of another class."""
        if not self.lines:
            return None
        longest = self._longest_line()
        if newcomer is None:
            return longest.by_priority[-1]
        if longest.relative_length > (self.num_of(newcomer) + 1) / self.ledger.weight(newcomer):
            return longest.by_priority[-1]
        line = self.lines.get(newcomer)
        return line.by_priority[-1] if line is not None and line.by_priority[-1].priority > priority else None


class AdmissionQueue(Generic[T]):
    """The requests that wait for nodes, in the order in which they are tried."""

    def __init__(
        self,
        max_waiting: int,
        ageing_s: float,
        rng: Random,
        output_weight: float = 2.0,
        urgent_share: float = 0.5,
    ) -> None:
        """`ageing_s`: how many seconds of waiting weigh as much as one step of priority; 0: none ever do.

        `output_weight`: for how many tokens of a prompt a generated token counts in a tenant's share. `urgent_share`:
        what urgent requests get at most of the tokens, and of the queue, while normal ones wait.
        """
        self.times = ServiceTimes()
        self._max_waiting = max_waiting
        self._ageing_s = ageing_s
        self._rng = rng
        self._retries: list[Ticket[T]] = []
        """Requests that were placed before."""
        self._classes: Mapping[ServiceClass, _Class[T]] = {each: _Class(output_weight) for each in ServiceClass}
        self.urgent = UrgentShare(urgent_share, lambda name: self._classes[name].num_requests)
        self._count = 0
        self._num_new = 0
        """The number of requests of all classes: it is asked for with every event."""

    def __len__(self) -> int:
        return len(self._retries) + self._num_new

    def ledger(self, service_class: ServiceClass) -> TenantLedger:
        """What the tenants have had of the service to this class."""
        return self._classes[service_class].ledger

    def turns(self, service_class: ServiceClass) -> Turns:
        """What the tenants have on nodes of this class."""
        return self._classes[service_class].turns

    def ticket(
        self,
        item: T,
        arrived: float,
        priority: int,
        targets: LatencyTargets,
        *,
        is_retry: bool = False,
        tenant: str = "",
        service_class: ServiceClass = ServiceClass.NORMAL,
        weight: float = 1.0,
    ) -> Ticket[T]:
        """Make a ticket, which `add` puts into the queue."""
        self._count += 1
        # All requests age alike, so the order of two never changes while they wait.
        rank = arrived + self._ageing_s * priority if self._ageing_s else float(priority)
        return Ticket(
            item,
            self._count,
            arrived,
            priority,
            rank,
            targets,
            is_retry=is_retry,
            tenant=tenant,
            service_class=service_class,
            weight=weight,
        )

    def first(self) -> Ticket[T] | None:
        """The next request, if any waits."""
        if self._retries:
            return self._retries[0]
        if not self._num_new:
            return None
        firsts = (self._classes[name].first() for name in self.urgent.order)
        return next((first for first in firsts if first is not None), None)

    def is_next(self, ticket: Ticket[T]) -> bool:
        """Whether no request in the queue is ahead of it."""
        if self._retries or ticket.is_retry:
            return not self._retries or ticket.order_key <= self._retries[0].order_key
        order = self.urgent.order
        before = order[: order.index(ticket.service_class)]
        if any(self._classes[name].num_requests for name in before):
            return False
        return self._classes[ticket.service_class].is_next(ticket)

    def check_room(
        self, priority: int, num_running: int, tenant: str = "", service_class: ServiceClass = ServiceClass.NORMAL
    ) -> None:
        """Raises QueueFull if a newcomer of this priority could not wait now."""
        self._find_room(priority, num_running, tenant, service_class)

    def _find_room(self, priority: int, num_running: int, tenant: str, service_class: ServiceClass) -> Ticket[T] | None:
        """The request that gives way to a newcomer; None: there is room. Raises QueueFull if there is neither."""
        if self._num_new < self._max_waiting:
            return None
        if (found := self._gives_way(priority, tenant, service_class)) is None:
            why = f"{self._num_new} requests wait, as many as may, and none of them gives way to this one"
            raise QueueFull(why, self.retry_after_s(num_running, tenant, service_class))
        return found

    def add(self, ticket: Ticket[T], now: float, num_running: int) -> Ticket[T] | None:
        """Put a ticket into the queue. Returns the one that gave way to it, if any; raises QueueFull or WouldBeLate."""
        if ticket.is_retry:
            bisect.insort(self._retries, ticket, key=_order_key)
            return None
        tenant, of_class = ticket.tenant, self._classes[ticket.service_class]
        displaced = self._find_room(ticket.priority, num_running, tenant, ticket.service_class)
        line = of_class.lines.get(tenant)
        num_before = 0 if line is None else bisect.bisect(line.order, ticket.order_key, key=_order_key)
        first_token_s = self._wait_s(tenant, ticket.service_class, num_before, num_running)
        first_token_s += self.times.first_token_s()
        self.check_in_time(ticket, now, first_token_s, self.times.token_s(), num_running)
        self.check_pace(ticket, self.times.pace_s(now), num_running)
        if displaced is not None:
            self.remove(displaced)
        self.put_back(ticket)
        return displaced

    def num_before(self, ticket: Ticket[T]) -> tuple[int, int]:
        """How many tenants come before a waiting request's one, and how many requests of its own before it."""
        if ticket.is_retry:
            return 0, bisect.bisect_left(self._retries, ticket.order_key, key=_order_key)
        of_class = self._classes[ticket.service_class]
        urgent = (each.lines for name, each in self._classes.items() if name < ticket.service_class)
        tenants = set().union(*urgent) - {ticket.tenant}
        return of_class.ledger.num_before(ticket.tenant) + len(tenants), of_class.num_ahead(ticket)

    def put_back(self, ticket: Ticket[T]) -> None:
        """Put a ticket into the queue whose request has waited already, whatever the bounds."""
        if ticket.is_retry:
            bisect.insort(self._retries, ticket, key=_order_key)
        else:
            self._classes[ticket.service_class].add(ticket)
            self._num_new += 1

    def remove(self, ticket: Ticket[T]) -> None:
        """Take a ticket out of the queue. Idempotent."""
        if ticket.is_retry:
            _remove_at(self._retries, ticket, bisect.bisect_left(self._retries, ticket.order_key, key=_order_key))
        else:
            self._num_new -= self._classes[ticket.service_class].remove(ticket)

    def retry_after_s(
        self, num_running: int, tenant: str = "", service_class: ServiceClass = ServiceClass.NORMAL
    ) -> float:
        """After how many seconds a request of a tenant that is turned away now should come again."""
        num_before = self._classes[service_class].num_of(tenant)
        drained_s = self._wait_s(tenant, service_class, num_before, num_running)
        return min(max(drained_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S) * self._rng.uniform(0.75, 1.25)

    def _wait_s(self, tenant: str, service_class: ServiceClass, num_before: int, num_running: int) -> float:
        """How long a request waits that has so many of its own before it: others take their shares meanwhile."""
        of_class = self._classes[service_class]
        # The others can't be served more requests meanwhile than they have waiting.
        num_meanwhile = min((num_before + 1) * of_class.times_as_long(tenant) - 1, of_class.num_requests)
        own_s = self.times.wait_s(num_meanwhile, num_running)
        num_urgent = len(self._retries) + self.urgent.num_meanwhile(service_class, num_meanwhile + 1)
        return own_s + (self.times.wait_s(num_urgent - 1, num_running) if num_urgent else 0.0)

    def _gives_way(self, priority: int, tenant: str, service_class: ServiceClass) -> Ticket[T] | None:
        """The request that gives way to a new one; None: none does."""
        for name in self.urgent.giving_way_to(service_class, self._max_waiting):
            newcomer = tenant if name is service_class else None
            if (found := self._classes[name].gives_way(newcomer, priority)) is not None:
                return found
        return None

    def check_in_time(
        self, ticket: Ticket[T], now: float, first_token_s: float, token_s: float, num_running: int
    ) -> None:
        """Raises WouldBeLate if tokens come too late: the first after `first_token_s`, then one per `token_s`."""
        targets = ticket.targets
        last_token_s = first_token_s + (targets.least_tokens - 1) * token_s
        why = ""
        if targets.first_token_by is not None and now + first_token_s > targets.first_token_by:
            why = f"its first token is predicted in {first_token_s:.3f} s, after the time that it allows"
        elif targets.deadline is not None and now + last_token_s > targets.deadline:
            why = f"its end is predicted in {last_token_s:.3f} s or later, after its deadline"
        if why:
            raise WouldBeLate(why, self.retry_after_s(num_running, ticket.tenant, ticket.service_class))

    def check_pace(self, ticket: Ticket[T], token_s: float, num_running: int) -> None:
        """Raises WouldBeLate if a token every `token_s` seconds is slower than the target."""
        allowed_s = ticket.targets.token_s
        if allowed_s is not None and token_s > allowed_s:
            why = f"a token is predicted every {token_s * 1e3:.3g} ms, and it allows {allowed_s * 1e3:.3g} ms"
            raise WouldBeLate(why, self.retry_after_s(num_running, ticket.tenant, ticket.service_class))


def _order_key(ticket: Ticket[T]) -> tuple[bool, float, float, int]:
    return ticket.order_key


def _priority_key(ticket: Ticket[T]) -> tuple[int, int]:
    return ticket.priority_key


def _remove_at(tickets: list[Ticket[T]], ticket: Ticket[T], position: int) -> None:
    if position < len(tickets) and tickets[position] is ticket:
        del tickets[position]

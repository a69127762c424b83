"""The queue in front of placement: who waits, in which order, and who is turned away. Pure: the clock is an argument.

Nodes have queues of their own, and what waits there can neither be overtaken nor moved any more, and is lost with its
node. So the router hands a node little more than it can run and keeps the rest here. The rules:

1. A full node gets no newcomer. Full is a node that has a headroom beyond what it runs at once, so that it never falls
   idle between two reports. Nodes that don't say how much they run are never full.
2. Whoever finds no node, or full ones only, waits; there is one queue for both (but one of text, and one of embeddings,
   see `waiting_room`). First come those who have been placed before and lost their nodes: their clients are in
   mid-stream. Then priority classes, in which waiting makes up for priority as on the nodes, so that nobody starves.
3. The queue is bounded. When it is full the lowest class gives way to a better one, the newest of it first.
4. A request that would be too late for its deadline, or for the first token that it hopes for, or whose tokens would
   come more slowly than it hopes, is refused at once: the client has its time for something else. Only what is measured
   of this very router counts, and of that the best. An idle node is worth a try: a pace that it can't keep is held
   against it only while requests show it, so that a bad measurement does not keep away what would correct it.
5. Who is turned away is told to come again when the queue is predicted to be empty; each a little differently, so that
   they don't all come at once.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from random import Random
from typing import Generic, TypeVar

from baton.errors import QueueFull, WouldBeLate
from baton.messages.node import NodeDescription
from baton.values import value

_QUEUED_STEPS = 16
"""So many steps' worth of uncomputed prompts fill a node, however few its sequences are."""
_RECENT = 64
"""Requests whose times are remembered."""
_OF_LATE_S = 60.0
"""So long does the pace of a request that has ended say what an idle node can do."""
_SHORTEST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0

T = TypeVar("T")


def is_full(node: NodeDescription, sequences: float, waiting: int, uncomputed_tokens: int) -> bool:
    """Whether what it has would only queue there with one more.

    `sequences` are all that it has, our own that it has not reported yet included; `waiting` those that wait for room
    there, as reported; `uncomputed_tokens` those of prompts that wait or are being computed.
    """
    if node.max_num_seqs:
        headroom = max(2, node.max_num_seqs // 8)
        if waiting >= headroom or sequences >= node.max_num_seqs + headroom:
            return True
    step = node.max_num_batched_tokens
    return bool(step) and uncomputed_tokens >= _QUEUED_STEPS * step


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
    """A place in the queue, or the wish for one."""

    __slots__ = ("arrived", "class_key", "is_retry", "item", "order_key", "priority", "targets")

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
    ) -> None:
        self.item = item
        self.arrived = arrived
        self.priority = priority
        self.targets = targets
        self.is_retry = is_retry
        """It was placed before."""
        self.order_key = (not is_retry, rank, arrived, number)
        self.class_key = (priority, number)


class ServiceTimes:
    """What requests took of late, from their placement on. Seconds."""

    def __init__(self) -> None:
        self._service: deque[float] = deque(maxlen=_RECENT)
        self._first_token: deque[float] = deque(maxlen=_RECENT)
        self._per_token: deque[float] = deque(maxlen=_RECENT)
        self._paced_at = -math.inf

    def ended(self, first_token_s: float, service_s: float, num_tokens: int, now: float = 0.0) -> None:
        """A request ended well, at `now`."""
        self._service.append(service_s)
        self._first_token.append(first_token_s)
        if num_tokens > 1:
            self._paced_at = now
            self._per_token.append((service_s - first_token_s) / (num_tokens - 1))

    def wait_s(self, num_ahead: int, num_running: int) -> float:
        """Until so many have been placed, and one more; 0 while nothing is known. By Little's law."""
        if not self._service or not num_running:
            return 0.0
        return (num_ahead + 1) * sum(self._service) / len(self._service) / num_running

    def first_token_s(self) -> float:
        """The quickest of late; 0 while nothing is known."""
        return min(self._first_token, default=0.0)

    def token_s(self) -> float:
        """The quickest pace of late; 0 while nothing is known."""
        return min(self._per_token, default=0.0)

    def pace_s(self, now: float) -> float:
        """The same, 0 also when no request has shown it for a while."""
        return self.token_s() if now - self._paced_at <= _OF_LATE_S else 0.0


class AdmissionQueue(Generic[T]):
    """Requests that wait for a node."""

    def __init__(self, max_waiting: int, ageing_s: float, rng: Random) -> None:
        """`ageing_s`: how many seconds of waiting weigh as much as one step of priority; 0: none ever do."""
        self.times = ServiceTimes()
        self._max_waiting = max_waiting
        self._ageing_s = ageing_s
        self._rng = rng
        self._order: list[Ticket[T]] = []
        self._by_class: list[Ticket[T]] = []
        """Those that may have to give way, the first of them last."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._order)

    def ticket(
        self, item: T, arrived: float, priority: int, targets: LatencyTargets, *, is_retry: bool = False
    ) -> Ticket[T]:
        """What `offer` takes; not in the queue yet."""
        self._count += 1
        # Everybody ages alike, so the order of two never changes while they wait.
        rank = arrived + self._ageing_s * priority if self._ageing_s else float(priority)
        return Ticket(item, self._count, arrived, priority, rank, targets, is_retry=is_retry)

    def first(self) -> Ticket[T] | None:
        """Who is next."""
        return self._order[0] if self._order else None

    def is_next(self, ticket: Ticket[T]) -> bool:
        """Whether nobody in the queue is ahead of it."""
        return not self._order or ticket.order_key <= self._order[0].order_key

    def check_room(self, priority: int, num_running: int) -> None:
        """Raises QueueFull if a newcomer of this priority could not wait now."""
        if len(self._by_class) >= self._max_waiting and not self._gives_way(priority):
            story = f"{len(self._by_class)} requests wait, as many as may, and none is less urgent"
            raise QueueFull(story, self.retry_after_s(num_running))

    def offer(self, ticket: Ticket[T], now: float, num_running: int) -> Ticket[T] | None:
        """Let it wait. Returns the one that had to leave for it, if any; raises QueueFull or WouldBeLate."""
        if ticket.is_retry:
            bisect.insort(self._order, ticket, key=_order_key)
            return None
        self.check_room(ticket.priority, num_running)
        num_ahead = bisect.bisect(self._order, ticket.order_key, key=_order_key)
        first_token_s = self.times.wait_s(num_ahead, num_running) + self.times.first_token_s()
        self.check_in_time(ticket.targets, now, first_token_s, self.times.token_s(), num_running)
        self.check_pace(ticket.targets, self.times.pace_s(now), num_running)
        displaced = self._by_class[-1] if len(self._by_class) >= self._max_waiting else None
        if displaced is not None:
            self.leave(displaced)
        bisect.insort(self._order, ticket, key=_order_key)
        bisect.insort(self._by_class, ticket, key=_class_key)
        return displaced

    def leave(self, ticket: Ticket[T]) -> None:
        """It waits no more. Idempotent."""
        _take_out(self._order, ticket, bisect.bisect_left(self._order, ticket.order_key, key=_order_key))
        _take_out(self._by_class, ticket, bisect.bisect_left(self._by_class, ticket.class_key, key=_class_key))

    def retry_after_s(self, num_running: int) -> float:
        """What to tell somebody who is turned away now."""
        drained_s = self.times.wait_s(len(self._order), num_running)
        return min(max(drained_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S) * self._rng.uniform(0.75, 1.25)

    def check_in_time(
        self, targets: LatencyTargets, now: float, first_token_s: float, token_s: float, num_running: int
    ) -> None:
        """Raises WouldBeLate if its tokens would come too late: the first after so long, then one each `token_s`."""
        last_token_s = first_token_s + (targets.least_tokens - 1) * token_s
        what = ""
        if targets.first_token_by is not None and now + first_token_s > targets.first_token_by:
            what = f"its first token is predicted in {first_token_s:.3f} s, after the time that it allows"
        elif targets.deadline is not None and now + last_token_s > targets.deadline:
            what = f"its end is predicted in {last_token_s:.3f} s or later, after its deadline"
        if what:
            raise WouldBeLate(what, self.retry_after_s(num_running))

    def check_pace(self, targets: LatencyTargets, token_s: float, num_running: int) -> None:
        """Raises WouldBeLate if a token each `token_s` is slower than it hopes for."""
        if targets.token_s is not None and token_s > targets.token_s:
            what = f"a token is predicted every {token_s * 1e3:.3g} ms, and it allows {targets.token_s * 1e3:.3g} ms"
            raise WouldBeLate(what, self.retry_after_s(num_running))

    def _gives_way(self, priority: int) -> bool:
        return bool(self._by_class) and self._by_class[-1].priority > priority


def _order_key(ticket: Ticket[T]) -> tuple[bool, float, float, int]:
    return ticket.order_key


def _class_key(ticket: Ticket[T]) -> tuple[int, int]:
    return ticket.class_key


def _take_out(tickets: list[Ticket[T]], ticket: Ticket[T], place: int) -> None:
    if place < len(tickets) and tickets[place] is ticket:
        del tickets[place]

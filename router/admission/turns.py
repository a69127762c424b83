"""When it is the turn of a request among those that wait on its node. Pure: times are arguments.

The router's queue gives each tenant its share of places on nodes. Behind it there is the queue of the node, in which
the requests of a tenant with many would stand before the only one of another. So each request has a turn there:

1. A turn is a moment: that of the placement, and later by as long as the tenant's requests that are on nodes keep all
   nodes busy. That is the tenant's share of what is on nodes, divided by its weight, times the mean time of a request.
   A tenant with nothing on nodes has its turn at once, and one that has everything there after a whole request.
2. A tenant's turn is never before that of its requests that are on nodes: they keep their order. But where those were
   delayed by much more than a whole request takes by now, it is a whole request later: a tenant that always has
   requests there would otherwise keep the delay of a time when they took long. The share is that before the request
   itself counts, so that the length of a request does not delay it.
3. An urgent request's turn is earlier by the time of a request, one of a batch later by as much.
4. Time passes for all routers and nodes alike. So turns of several routers, also of one that has just started, are
   comparable, and nobody starves: a request waits only for those that come before its turn.
5. An attempt after the first has its turn at once. A router that shares nothing among tenants tells no turns.

Virtual token counters (`ledger`) have none of that: those of a router that has just started begin with 0, before all
those of others, and a node would have to know how far the counters of each router have come.

Where one tenant has nearly all that is on nodes, the requests that wait for seats are its own. Then one of another
tenant goes ahead of them and need not wait for a place to become free (`goes_ahead`): its prompt is computed meanwhile.
So does an urgent one where most of what is on nodes is not urgent. One of a batch never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.values import value

_LEAST_LEAD = 0.25
"""A request goes ahead of those that wait on a node if its turn is earlier than theirs by this part of the mean time of
a request. So long they have waited at most, since they are few beside those that run (see `room`)."""

_MOST_TIMES_LONGER = 2.5
"""A tenant's order is kept as long as the delay of its last turn is at most so many times the longest one by the mean
time of now: that mean varies, and falls by half within a few requests."""


@value(frozen=True, slots=True)
class Turn:
    """The turn of a request that has a place on nodes, and what it counts there."""

    tenant: str
    amount: float
    at: float
    """Seconds on the router's clock."""


@dataclass(slots=True)
class _OnNodes:
    """What a tenant has on nodes."""

    amount: float = 0.0
    count: int = 0
    last_turn: float = 0.0


class Turns:
    """What each tenant has on nodes, and the turns that follow from that. Every operation takes O(1)."""

    def __init__(self) -> None:
        self._tenants: dict[str, _OnNodes] = {}
        """The tenants with requests on nodes."""
        self._amount = 0.0
        self._squares = 0.0
        """The sum of the tenants' amounts, and of their squares."""

    def place(self, tenant: str, amount: float, now: float, request_s: float, delay: float = 0.0) -> Turn:
        """A request gets a place on nodes. `amount`: what it is charged, in tokens divided by the tenant's weight.

        `request_s`: the mean time from the placement of a request to its end, in seconds; `delay`: by how many of those
        its turn is later than that of others.
        """
        at = now + (self._share(tenant) + delay) * request_s
        entry = self._tenants.setdefault(tenant, _OnNodes())
        if entry.count:
            longest = (1.0 + delay) * request_s
            is_old = entry.last_turn - now > _MOST_TIMES_LONGER * longest
            at = max(at, now + longest if is_old else entry.last_turn)
        entry.last_turn, entry.count = at, entry.count + 1
        self._change(entry, amount)
        return Turn(tenant, amount, at)

    def end(self, turn: Turn) -> None:
        """A request that was placed has ended."""
        entry = self._tenants[turn.tenant]
        entry.count -= 1
        self._change(entry, -entry.amount if not entry.count else -turn.amount)
        if not entry.count:
            del self._tenants[turn.tenant]
        if not self._tenants:
            # Rounding errors don't add up.
            self._amount = self._squares = 0.0

    def goes_ahead(self, tenant: str, others: Sequence[tuple[Turns, float]] = ()) -> bool:
        """Whether the tenant's next request is likely to go ahead of those that wait for seats on nodes.

        `others`: what is there of other classes, and by how many times of a request their turns are later than ours.
        """
        classes = [(turns, later) for turns, later in ((self, 0.0), *others) if turns._amount > 0.0]
        amount = sum(turns._amount for turns, _ in classes)
        if not amount:
            return False
        # By how many times of a request turns were later than their placement, each weighed by its amount.
        mean = sum(turns._squares / turns._amount + later * turns._amount for turns, later in classes) / amount
        return mean - self._share(tenant) >= _LEAST_LEAD

    def _share(self, tenant: str) -> float:
        entry = self._tenants.get(tenant)
        # Sums that are rounded can be less than their largest part.
        return 0.0 if entry is None or not self._amount else min(1.0, entry.amount / self._amount)

    def _change(self, entry: _OnNodes, change: float) -> None:
        self._squares += (entry.amount + change) ** 2 - entry.amount**2
        self._amount += change
        entry.amount += change

"""The service that each tenant has got, by which the tenant is chosen whose request is next. Pure.

These are the virtual token counters of https://arxiv.org/abs/2401.00588. A tenant's counter is what its requests have
cost, in tokens divided by the tenant's weight. The rules:

1. Of the tenants with waiting requests the one with the lowest counter is next; of equal ones the one that waits for
   longer.
2. A request is charged when it gets nodes, with the tokens of its prompt and those that requests of its tenant usually
   generate, each of which counts as several of a prompt. When it ends, the charge becomes what it has cost. An attempt
   after the first costs nothing.
3. A tenant that had no waiting request begins to wait, or gets nodes before those that wait, with its own counter, but
   with one that is at most a few of its requests behind the virtual time (the highest of all lowest counters of waiting
   tenants): a time without requests earns a burst of so many, and no more. If nobody waited at some time since it was
   charged last, its counter is also no higher than that of every waiting tenant: capacity that nobody else wanted costs
   nothing. What a charge turns out to have been too much is given back only as far as the counter has not been moved
   since.
4. A tenant without requests is forgotten when there are too many such tenants. It then comes as a new one does.
5. What other routers have charged the tenant since their last exchange counts as if it had been charged here
   (`exchange`). They may give back less than rule 3 lets them: only as much as they charged here since the counter was
   moved.
6. A tenant whose requests wait at another router is as one that waits here, but that its request can't be next here. A
   tenant that is ahead of it, by more than its own last request, is ahead of its share (`is_ahead`).

Of two tenants that always have waiting requests, the service divided by the weights differs by at most twice the
largest charge of a request, and by what running requests are still to be charged.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Set

from baton.values import value

_FIRST_OUTPUT = 128.0
"""The tokens that a request of a new tenant is expected to generate."""
_NEWEST = 0.05
"""The weight of the newest request in the mean length of a tenant's outputs."""
_BURST = 4
"""A tenant that has had less than others has so many requests before theirs when it begins to wait."""
_MAX_IDLE = 10_000
"""So many tenants without waiting requests are remembered."""


@value(frozen=True, slots=True)
class Charge:
    """What a request was charged when it got nodes."""

    tenant: str
    tokens: float
    moved: float
    """`_Account.moved` at that time."""
    weight: float
    """The tenant's weight at that time."""


@value(frozen=True, slots=True)
class Standing:
    """Where a tenant stands among the others, in tokens for a weight of 1."""

    counter: float
    virtual_time: float
    """The counter with which a new tenant begins to wait."""


class _Account:
    """What is known of a tenant."""

    __slots__ = ("by_others", "counter", "last_charge", "mean_output", "moved", "number", "period", "weight")

    def __init__(self, counter: float) -> None:
        self.counter = counter
        self.weight = 1.0
        self.mean_output = _FIRST_OUTPUT
        self.last_charge = 0.0
        """In tokens divided by the weight."""
        self.moved = 0.0
        """By how much the counter was moved in all, when the tenant began to wait."""
        self.period = -1
        """The period in which it was charged last or stopped waiting."""
        self.number = 0
        """Grows with the time at which it began to wait."""
        self.by_others = 0.0
        """What other routers have charged since the counter was moved."""


class TenantLedger:
    """The counters of all tenants. Every operation takes O(log n) for n waiting tenants, over many operations."""

    def __init__(self, output_weight: float = 2.0) -> None:
        """`output_weight`: for how many tokens of a prompt a generated token counts."""
        self._output_weight = output_weight
        self._waiting: dict[str, _Account] = {}
        self._idle: OrderedDict[str, _Account] = OrderedDict()
        """The tenants without waiting requests, the one that was charged last at the end."""
        self._lowest: list[tuple[float, int, str]] = []
        self._highest: list[tuple[float, int, str]] = []
        """Heaps of (counter, number, tenant), the second with the counters' negatives. Entries are left in them when
        they no longer hold, and skipped when they come first."""
        self._numbers = itertools.count(1)
        self._period = 0
        """Counts the times at which the first tenant began to wait, and at which the last one stopped."""
        self._now = 0.0
        """The virtual time: the highest of all lowest counters of waiting tenants. A new tenant begins with it."""
        self._elsewhere: Set[str] = frozenset()
        """The tenants whose requests wait at other routers, as those said last."""
        self._lowest_elsewhere: list[tuple[float, str]] = []
        """The two of them with the lowest counters at that time, with these."""
        self.waiting_weight = 0.0
        """The sum of the weights of the waiting tenants."""
        self.on_charged: Callable[[str, float, float], None] | None = None
        """Called with each change that a request of this router makes: the tenant, tokens, the tenant's weight."""

    def weight(self, tenant: str) -> float:
        """The tenant's weight; 1 if it was never told."""
        account = self._waiting.get(tenant) or self._idle.get(tenant)
        return 1.0 if account is None else account.weight

    def set_weight(self, tenant: str, weight: float) -> None:
        """What the tenant is charged from now on is divided by this weight."""
        if self.weight(tenant) == weight:
            return
        account = self._account(tenant)
        if tenant in self._waiting:
            self.waiting_weight += weight - account.weight
        account.weight = weight

    def begin_waiting(self, tenant: str, weight: float = 1.0) -> None:
        """A tenant without waiting requests has one."""
        account = self._idle.pop(tenant, None) or _Account(self._now)
        self._join(account)
        account.weight = weight
        account.number = next(self._numbers)
        self._period += not self._waiting
        self._waiting[tenant] = account
        self.waiting_weight += weight
        self._push(tenant, account)

    def end_waiting(self, tenant: str) -> None:
        """A tenant's last waiting request has left the queue."""
        self._note_time()
        account = self._waiting.pop(tenant)
        account.period = self._period
        self._period += not self._waiting
        self.waiting_weight = self.waiting_weight - account.weight if self._waiting else 0.0
        self._remember(tenant, account)

    def first(self) -> str | None:
        """The tenant whose request is next; None: none waits."""
        found = self._top(self._lowest, 1.0)
        return None if found is None else found[2]

    def is_first(self, tenant: str) -> bool:
        """Whether a request of this tenant that comes now, behind none of its own, is next."""
        lowest = self._top(self._lowest, 1.0)
        if lowest is None:
            return True
        account = self._idle.get(tenant)
        return lowest[2] == tenant or (account is not None and self._counter_to_join(account) < lowest[0])

    def charge(self, tenant: str, prompt_tokens: int, most_output: int, sequences: int = 1) -> Charge:
        """A request gets nodes. `most_output`: the most tokens that each of its sequences generates."""
        account = self._account(tenant)
        self._forgive(tenant, account)
        if self._waiting and tenant not in self._waiting:
            # It gets nodes at once, before those that wait.
            self._join(account)
        output = sequences * min(float(most_output), account.mean_output)
        charge = Charge(tenant, prompt_tokens + self._output_weight * output, account.moved, account.weight)
        account.last_charge = charge.tokens / account.weight
        self._charge(tenant, account, account.last_charge, account.weight)
        return charge

    def settle(self, charge: Charge, prompt_tokens: int, output_tokens: int, sequences: int = 1) -> float:
        """A request that was charged has ended, and has cost so many tokens. Returns that cost in tokens."""
        account = self._account(charge.tenant)
        self._forgive(charge.tenant, account)
        account.mean_output += _NEWEST * (output_tokens / sequences - account.mean_output)
        cost = prompt_tokens + self._output_weight * output_tokens
        change = (cost - charge.tokens) / charge.weight
        if change < 0:
            change = min(0.0, change + account.moved - charge.moved)
        self._charge(charge.tenant, account, change, charge.weight)
        return cost

    def charge_from_others(self, tenant: str, tokens: float, weight: float) -> None:
        """Another router has charged the tenant so many tokens, or given them back. `weight`: the one it has there."""
        account = self._account(tenant)
        self._forgive(tenant, account)
        if tenant not in self._waiting:
            account.weight = weight
        change = max(tokens / account.weight, -account.by_others)
        account.by_others += change
        self._add(tenant, account, change)

    def wait_elsewhere(self, tenants: Set[str]) -> None:
        """These tenants have requests that wait at other routers, and no others do."""
        counters = []
        for tenant in tenants:
            account = self._account(tenant)
            if tenant not in self._elsewhere and tenant not in self._waiting:
                self._join(account)
            counters.append((account.counter, tenant))
        self._elsewhere, self._lowest_elsewhere = tenants, heapq.nsmallest(2, counters)

    def is_ahead(self, tenant: str) -> bool:
        """Whether a tenant has had more than one that waits at another router, by more than its own last request."""
        least = next((counter for counter, name in self._lowest_elsewhere if name != tenant), None)
        account = self._waiting.get(tenant) or self._idle.get(tenant)
        if least is None or account is None:
            return False
        counter = account.counter if tenant in self._waiting else self._counter_to_join(account)
        return counter - account.last_charge > least

    @property
    def waiting(self) -> Collection[str]:
        """The tenants whose requests wait here, the one that has waited for longest first."""
        return self._waiting.keys()

    def virtual_time(self) -> float:
        """The counter with which a new tenant begins to wait, in tokens for a weight of 1."""
        self._note_time()
        return self._now

    def counter(self, tenant: str) -> float:
        """The tenant's counter, as `virtual_time`. Of one that does not wait: at least that time."""
        now = self.virtual_time()
        account = self._waiting.get(tenant)
        if account is not None:
            return account.counter
        account = self._idle.get(tenant)
        return now if account is None else max(now, account.counter)

    def standing(self, tenant: str) -> Standing:
        """Where the tenant stands now."""
        return Standing(self.counter(tenant), self._now)

    def lag(self, tenant: str) -> float:
        """How far the tenant's counter is ahead of the virtual time, in tokens for a weight of 1."""
        return self.counter(tenant) - self._now

    def num_before(self, tenant: str) -> int:
        """How many other waiting tenants come before this one. Takes O(n)."""
        own = self._waiting.get(tenant)
        if own is None:
            return len(self._waiting)
        place = (own.counter, own.number)
        return sum((each.counter, each.number) < place for each in self._waiting.values())

    def _account(self, tenant: str) -> _Account:
        account = self._waiting.get(tenant) or self._idle.get(tenant)
        if account is None:
            account = _Account(self._now)
            self._remember(tenant, account)
        return account

    def _remember(self, tenant: str, account: _Account) -> None:
        self._idle[tenant] = account
        if len(self._idle) > _MAX_IDLE:
            self._idle.popitem(last=False)

    def _charge(self, tenant: str, account: _Account, change: float, weight: float) -> None:
        """Change the counter, which is in tokens divided by this weight."""
        self._add(tenant, account, change)
        if self.on_charged is not None:
            self.on_charged(tenant, change * weight, account.weight)

    def _add(self, tenant: str, account: _Account, change: float) -> None:
        account.counter += change
        account.period = self._period
        if tenant in self._waiting:
            self._push(tenant, account)
        else:
            self._idle.move_to_end(tenant)

    def _forgive(self, tenant: str, account: _Account) -> None:
        """Forgive what rule 3 forgives, before a change: behind it nothing shows any more that nobody waited."""
        if tenant not in self._waiting and account.period != self._period:
            self._note_time()
            self._move(account, min(account.counter, self._most_without_debt()))

    def _join(self, account: _Account) -> None:
        self._move(account, self._counter_to_join(account))

    def _move(self, account: _Account, counter: float) -> None:
        move = abs(counter - account.counter)
        account.moved += move
        account.by_others = max(0.0, account.by_others - move)
        account.counter = counter

    def _counter_to_join(self, account: _Account) -> float:
        self._note_time()
        if not self._waiting:
            return self._now
        most = account.counter if account.period == self._period else self._most_without_debt()
        least = self._now - _BURST * account.last_charge
        return min(max(account.counter, least), max(most, least))

    def _most_without_debt(self) -> float:
        """The highest counter of waiting tenants; if there are none, the virtual time."""
        highest = self._top(self._highest, -1.0)
        return self._now if highest is None else -highest[0]

    def _note_time(self) -> None:
        if (lowest := self._top(self._lowest, 1.0)) is not None:
            self._now = max(self._now, lowest[0])

    def _push(self, tenant: str, account: _Account) -> None:
        heapq.heappush(self._lowest, (account.counter, account.number, tenant))
        heapq.heappush(self._highest, (-account.counter, account.number, tenant))
        if len(self._lowest) + len(self._highest) > 8 * len(self._waiting) + 128:
            self._lowest = [(each.counter, each.number, name) for name, each in self._waiting.items()]
            self._highest = [(-counter, number, name) for counter, number, name in self._lowest]
            heapq.heapify(self._lowest)
            heapq.heapify(self._highest)

    def _top(self, heap: list[tuple[float, int, str]], sign: float) -> tuple[float, int, str] | None:
        """The first entry that holds."""
        while heap:
            counter, number, tenant = heap[0]
            account = self._waiting.get(tenant)
            if account is not None and account.number == number and sign * counter == account.counter:
                return heap[0]
            heapq.heappop(heap)
        return None

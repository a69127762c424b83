"""What tenants were charged at other routers counts here, too: the totals that routers tell each other. Pure.

The rules:

1. Each router publishes what its own requests were charged, by ledger and tenant, as totals that go on from one
   exchange to the next, and charges its tenants the differences of others' totals. So an exchange that is missed or
   comes twice changes nothing in the end.
2. The totals of a router that was not known before are where its differences begin: what it charged before is not made
   up for. Its successor is another incarnation, so nothing of a dead router's is charged again.
3. The totals are those of at most `MAX_ENTRIES` tenants, without those that have not changed for `_KEPT_ROUNDS`
   exchanges, unless requests of them wait. One that comes back begins at 0 with another number.
4. Beside a total stands whether requests of the tenant wait there. Two tenants may use one router each, so that neither
   router has a choice among them: then the one that is ahead takes free seats alone, and the headroom of the nodes
   (`router.placement.room`) is left to the other one.

Without exchanges each router is fair for itself. With them the counters of a tenant at two routers differ by what the
other one has charged since the last exchange.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Annotated, NamedTuple

from pydantic import Field

from router.admission.ledger import TenantLedger

MAX_ENTRIES = 1000
_KEPT_ROUNDS = 60
_MAX_ROUTERS = 128
"""So many other routers are remembered."""


class ChargedTotal(NamedTuple):
    """What one router has charged a tenant in one ledger."""

    ledger: Annotated[str, Field(max_length=24)]
    tenant: Annotated[str, Field(max_length=64)]
    number: Annotated[int, Field(ge=0, lt=1 << 53)]
    """Another one for each time that the total began at 0."""
    tokens: Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)]
    weight: Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
    """The tenant's weight there."""
    waits: bool = False
    """Whether requests of it wait there."""


class _Entry:
    __slots__ = ("number", "round", "tokens", "weight")

    def __init__(self, number: int) -> None:
        self.number = number
        self.round = 0
        """When it was changed last."""
        self.tokens = 0.0
        self.weight = 1.0


class LedgerExchange:
    """The charges of one router's ledgers for other routers, and theirs for its ledgers."""

    def __init__(self, ledgers: Mapping[str, TenantLedger]) -> None:
        """`ledgers`: by a name, which is the same at all routers."""
        self._ledgers = ledgers
        self._own: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        """By ledger and tenant, the one that was changed last at the end."""
        self._round = 0
        self._num_entries = 0
        self._known: OrderedDict[str, dict[tuple[str, str], ChargedTotal]] = OrderedDict()
        """The latest totals of other routers, by incarnation, the latest router at the end."""
        for name, ledger in ledgers.items():
            ledger.on_charged = partial(self._on_charged, name)

    def _on_charged(self, ledger: str, tenant: str, tokens: float, weight: float) -> None:
        entry = self._own.get((ledger, tenant)) or self._new_entry(ledger, tenant)
        entry.tokens += tokens
        entry.weight, entry.round = weight, self._round
        self._own.move_to_end((ledger, tenant))

    def _new_entry(self, ledger: str, tenant: str) -> _Entry:
        self._num_entries += 1
        entry = self._own[ledger, tenant] = _Entry(self._num_entries)
        entry.round = self._round
        if len(self._own) > MAX_ENTRIES:
            self._own.popitem(last=False)
        return entry

    def next_totals(self) -> tuple[ChargedTotal, ...]:
        """The totals to publish in one exchange."""
        self._round += 1
        while self._own and next(iter(self._own.values())).round < self._round - _KEPT_ROUNDS:
            self._own.popitem(last=False)
        for name, ledger in self._ledgers.items():
            for tenant in islice(ledger.waiting, MAX_ENTRIES):
                if (name, tenant) not in self._own and len(self._own) < MAX_ENTRIES:
                    self._new_entry(name, tenant).weight = ledger.weight(tenant)
        return tuple(
            ChargedTotal(name, tenant, each.number, each.tokens, each.weight, tenant in self._ledgers[name].waiting)
            for (name, tenant), each in self._own.items()
        )

    def take_all(self, published: Mapping[str, Sequence[ChargedTotal]]) -> None:
        """Take the totals of all other routers that can be read now, by incarnation."""
        waiting: dict[str, set[str]] = {name: set() for name in self._ledgers}
        for incarnation, totals in published.items():
            self.take(incarnation, totals)
            for total in totals:
                if total.waits and total.ledger in waiting:
                    waiting[total.ledger].add(total.tenant)
        for name, tenants in waiting.items():
            self._ledgers[name].wait_elsewhere(tenants)

    def take(self, incarnation: str, totals: Sequence[ChargedTotal]) -> None:
        """Charge the tenants what they were charged at another router since its totals were taken last."""
        before = self._known.get(incarnation)
        now = self._known[incarnation] = {(each.ledger, each.tenant): each for each in totals}
        self._known.move_to_end(incarnation)
        if len(self._known) > _MAX_ROUTERS:
            self._known.popitem(last=False)
        if before is None:
            return
        for total in now.values():
            old = before.get((total.ledger, total.tenant))
            tokens = total.tokens - (old.tokens if old is not None and old.number == total.number else 0.0)
            ledger = self._ledgers.get(total.ledger)
            if tokens and ledger is not None:
                ledger.charge_from_others(total.tenant, tokens, total.weight)

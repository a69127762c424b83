"""What a router has done for each tenant, for operators alone: metrics, and the rows of `baton get tenants`."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping

from baton.messages.operator import TenantRow, TenantRows
from baton.observe.metrics import FIRST_TOKEN_BUCKETS_S, Distribution, Figure, Histogram

MAX_LABELS = 50
"""The first so many tenants have metrics of their own; all later ones share the label `OTHERS`."""
OTHERS = "other"
_MAX_TENANTS = 10_000
"""So many tenants are remembered."""
_SLOT_S = 5
_NUM_SLOTS = 12
"""A minute of slots."""


class TenantLabels:
    """The labels of the tenants in the metrics of one router."""

    def __init__(self) -> None:
        self._labels: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._labels))

    def of(self, tenant: str) -> str:
        """The label of a tenant."""
        if tenant in self._labels:
            return tenant
        label = tenant if len(self._labels) < MAX_LABELS else OTHERS
        self._labels.add(label)
        return label


class _Slot:
    """What happened in `_SLOT_S` seconds."""

    __slots__ = ("number", "placed", "served", "waited_s")

    def __init__(self, number: int) -> None:
        self.number = number
        self.served = 0.0
        self.placed = 0
        self.waited_s = 0.0


class _Record:
    """What is known of a tenant."""

    __slots__ = ("displaced", "refused", "served", "service_class", "slots", "weight")

    def __init__(self) -> None:
        self.service_class = ""
        self.weight = 1.0
        self.served = 0.0
        self.displaced = 0
        self.refused = 0
        self.slots: deque[_Slot] = deque(maxlen=_NUM_SLOTS)

    def slot(self, now: float) -> _Slot:
        number = int(now // _SLOT_S)
        if not self.slots or self.slots[-1].number != number:
            self.slots.append(_Slot(number))
        return self.slots[-1]

    def last_minute(self, now: float) -> _Slot:
        """The sums of the last minute."""
        oldest, sums = int(now // _SLOT_S) - _NUM_SLOTS, _Slot(0)
        for slot in reversed(self.slots):
            if slot.number <= oldest:
                break
            sums.served += slot.served
            sums.placed += slot.placed
            sums.waited_s += slot.waited_s
        return sums


class TenantFigures:
    """The figures of the tenants of one router. Seconds are those of the router's clock; tokens are those of a ledger.

    Metrics leave out requests without a tenant: where there are no keys, the router's own metrics are those.
    """

    def __init__(self, lag: Callable[[str], float]) -> None:
        """`lag`: how far a tenant's counter is ahead of the virtual time."""
        self.labels = TenantLabels()
        self._lag = lag
        self._records: OrderedDict[str, _Record] = OrderedDict()
        """By tenant, the one that was heard of last at the end."""
        self._served: Counter[str] = Counter()
        """By label, as the next two."""
        self._displaced: Counter[str] = Counter()
        self._waits: dict[str, Histogram] = {}

    def placed(self, tenant: str, service_class: str, weight: float, waited_s: float, now: float) -> None:
        """A request got nodes for the first time. `weight`: the tenant's."""
        record = self._record(tenant)
        record.service_class, record.weight = service_class, weight
        slot = record.slot(now)
        slot.placed += 1
        slot.waited_s += waited_s
        if tenant:
            self._waits.setdefault(self.labels.of(tenant), Histogram(FIRST_TOKEN_BUCKETS_S)).observe(waited_s)

    def served(self, tenant: str, tokens: float, now: float) -> None:
        """A request has ended, and has cost so many tokens."""
        record = self._record(tenant)
        record.served += tokens
        record.slot(now).served += tokens
        if tenant:
            self._served[self.labels.of(tenant)] += tokens  # type: ignore[assignment]

    def displaced(self, tenant: str) -> None:
        """A request gave way to another one in a full queue."""
        self._record(tenant).displaced += 1
        if tenant:
            self._displaced[self.labels.of(tenant)] += 1

    def refused(self, tenant: str) -> None:
        """A request was turned away before it had a token, for want of room or time."""
        self._record(tenant).refused += 1

    def rows(self, running: Mapping[str, int], waiting: Mapping[str, int], now: float, limit: int = 0) -> TenantRows:
        """At most `limit` tenants, 0: all; first those whose requests wait, last those without any in the last minute.

        The mappings: live requests, by tenant.
        """
        for tenant in (*running, *waiting):
            self._record(tenant)
        recent = {tenant: record.last_minute(now) for tenant, record in self._records.items()}

        def place(tenant: str) -> tuple[bool, float, int, int, int, str]:
            num_waiting, sums = waiting.get(tenant, 0), recent[tenant]
            return not num_waiting, -sums.served, -num_waiting, -running.get(tenant, 0), -sums.placed, tenant

        rows = []
        for tenant in sorted(self._records, key=place)[: limit or None]:
            record = self._records[tenant]
            row = TenantRow(
                tenant=tenant,
                service_class=record.service_class,
                weight=record.weight,
                running=running.get(tenant, 0),
                waiting=waiting.get(tenant, 0),
                served_tokens=record.served,
                served_last_minute=recent[tenant].served,
                placed_last_minute=recent[tenant].placed,
                waited_s_last_minute=recent[tenant].waited_s,
                lag_tokens=self._lag(tenant),
                displaced=record.displaced,
                refused=record.refused,
            )
            rows.append(row)
        return TenantRows(rows, sum(each.served for each in recent.values()))

    def figures(self) -> Iterator[Figure | Distribution]:
        """The metrics, by tenant."""
        labels = list(self.labels)
        text = "Service that requests of the tenant have cost when they ended: tokens of prompts that were not cached,"
        text += " and generated ones, each of which counts as several."
        for label in labels:
            yield Figure("tenant_service_tokens_total", text, self._served[label], {"tenant": label})
        text = "Requests that gave way to others in a full queue, by tenant."
        for label in labels:
            yield Figure("tenant_displaced_total", text, self._displaced[label], {"tenant": label})
        text = "How far the tenant is ahead of the waiting tenant that got least, in tokens for a weight of 1."
        for label in labels:
            if label != OTHERS:
                yield Figure("tenant_lag_tokens", text, self._lag(label), {"tenant": label})
        text = "What requests of the tenant waited at the router until a node was found."
        for label, histogram in sorted(self._waits.items()):
            yield histogram.now("tenant_queue_seconds", text, {"tenant": label})

    def _record(self, tenant: str) -> _Record:
        record = self._records.get(tenant)
        if record is None:
            record = self._records[tenant] = _Record()
            if len(self._records) > _MAX_TENANTS:
                self._records.popitem(last=False)
        else:
            self._records.move_to_end(tenant)
        return record

"""The responses that a router keeps in its memory, for clients that continue a conversation or read it again.

They are bounded in number, in bytes and by time. When one bound is exceeded, the tenant that has most loses its oldest
response: a tenant that has less than its share (the bound divided by the number of tenants) loses none to others. No
response passes through the registry, so each is known to one router alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from baton.clock import Clock
from baton.metric import Metric
from router.http.responses.items import Item


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that ended well, with its whole conversation, so that it needs no earlier response."""

    id: str
    json: bytes
    """The response object."""
    items: Sequence[Item]
    """The conversation: all input, the earlier answers in it, and last the response's own items."""
    num_own: int
    """How many items are the response's own."""

    num_bytes: int
    """The memory that the response takes, at most."""

    @classmethod
    def of(cls, response_id: str, json: bytes, before: Sequence[Item], own: Sequence[Item]) -> StoredResponse:
        """A response and its conversation: `own` are its own items, `before` all others."""
        items = (*before, *own)
        return cls(response_id, json, items, len(own), len(json) + sum(item.num_bytes for item in items))

    @property
    def input_items(self) -> Sequence[Item]:
        """The conversation before the response."""
        return self.items[: len(self.items) - self.num_own]


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """What a router keeps at most; the router's settings of the same names."""

    stored_responses: int
    stored_response_memory: int
    """Bytes."""
    stored_response_s: float
    """Seconds that a response is kept after it was stored."""


@dataclass(slots=True)
class StoreStats:
    """What a store has, and what it has lost to its bounds."""

    num_responses: Annotated[int, Metric("stored_responses", "Responses that this router keeps.")] = 0
    num_bytes: Annotated[
        int,
        Metric("stored_response_bytes", "Memory of the responses that this router keeps, with their conversations."),
    ] = 0
    evicted: Annotated[
        int,
        Metric(
            "stored_responses_evicted_total", "Responses that had to go before their time, to make room for others."
        ),
    ] = 0


@dataclass(slots=True)
class _Tenant:
    """What one tenant has in the store."""

    expiries: dict[str, float] = field(default_factory=dict)
    """By the response's id, the oldest first."""
    num_bytes: int = 0


class ResponseStore:
    """The stored responses of all tenants. `clock` tells when they expire."""

    def __init__(self, bounds: StoreBounds, clock: Clock) -> None:
        self._bounds = bounds
        self._clock = clock
        self._stored: dict[tuple[str, str], StoredResponse] = {}
        """By tenant and id, the oldest first."""
        self._tenants: dict[str, _Tenant] = {}
        self._stats = StoreStats()

    @property
    def bounds(self) -> StoreBounds:
        return self._bounds

    @property
    def is_on(self) -> bool:
        """Whether anything is kept at all."""
        return min(self._bounds.stored_responses, self._bounds.stored_response_memory) > 0

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Keep a response, whose id is new. Others, or this one, go if there is no room."""
        self._expire()
        self._stored[tenant, response.id] = response
        owner = self._tenants.setdefault(tenant, _Tenant())
        owner.expiries[response.id] = self._clock.monotonic() + self._bounds.stored_response_s
        owner.num_bytes += response.num_bytes
        self._stats.num_responses += 1
        self._stats.num_bytes += response.num_bytes
        while self._stats.num_responses > self._bounds.stored_responses:
            self._evict(lambda has: len(has.expiries))
        while self._stats.num_bytes > self._bounds.stored_response_memory:
            self._evict(lambda has: has.num_bytes)

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The tenant's response with this id; None: there is none any more, or there never was."""
        self._expire()
        return self._stored.get((tenant, response_id))

    def remove(self, tenant: str, response_id: str) -> bool:
        """Forget the tenant's response with this id; returns whether there was one."""
        self._expire()
        if (tenant, response_id) not in self._stored:
            return False
        self._forget(tenant, response_id)
        return True

    def stats(self) -> StoreStats:
        """What the store has now."""
        self._expire()
        return self._stats

    def _evict(self, size: Callable[[_Tenant], int]) -> None:
        """Forget the oldest response of the tenant with the largest size."""
        tenant = max(self._tenants, key=lambda name: size(self._tenants[name]))
        self._stats.evicted += 1
        self._forget(tenant, next(iter(self._tenants[tenant].expiries)))

    def _forget(self, tenant: str, response_id: str) -> None:
        response, owner = self._stored.pop((tenant, response_id)), self._tenants[tenant]
        del owner.expiries[response_id]
        owner.num_bytes -= response.num_bytes
        if not owner.expiries:
            del self._tenants[tenant]
        self._stats.num_responses -= 1
        self._stats.num_bytes -= response.num_bytes

    def _expire(self) -> None:
        now = self._clock.monotonic()
        while self._stored:
            tenant, response_id = next(iter(self._stored))
            if self._tenants[tenant].expiries[response_id] > now:
                return
            self._forget(tenant, response_id)

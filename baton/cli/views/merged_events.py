"""Merges the events that several routers saw: ordered by time, without duplicates. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cachetools import FIFOCache

if TYPE_CHECKING:
    from baton.messages.operator import ClusterEvent

SAME_S = 5.0
"""Equal events of two routers within this time are one event.

Routers check their nodes once a second and read the registry every two seconds, so they see an event within less time.
"""
_ONCE = frozenset({"NodeJoined", "NodeReady", "RouterJoined"})
"""Events that a router sees whenever it starts. Equal ones are one event at any distance in time."""
_REMEMBERED = 10_000


class EventMerger:
    """Recognises events that another router has already reported."""

    def __init__(self) -> None:
        self._seen: FIFOCache[tuple[str, ...], tuple[float, str]] = FIFOCache(_REMEMBERED)

    def is_new(self, event: ClusterEvent) -> bool:
        """Whether no other router has reported this event."""
        key = (event.reason, event.subject, event.incarnation, event.request_id, event.detail)
        when, router = self._seen.get(key, (float("-inf"), event.router))
        if router != event.router and (event.reason in _ONCE or abs(event.time - when) < SAME_S):
            return False
        self._seen[key] = (event.time, event.router)
        return True

    def merge(self, events: Iterable[ClusterEvent]) -> list[ClusterEvent]:
        """The new ones among the events, the oldest first."""
        return [event for event in sorted(events, key=lambda event: event.time) if self.is_new(event)]

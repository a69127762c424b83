"""What several routers saw of one cluster, as one story: by time, and what two of them saw is told once. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cachetools import FIFOCache

if TYPE_CHECKING:
    from baton.messages.steering import ClusterEvent

SAME_S = 5.0
"""Routers look once a second and read the registry every other one: what they see further apart are two things."""
_ONCE = frozenset({"NodeJoined", "NodeReady", "RouterJoined"})
"""Whoever starts late sees these late."""
_REMEMBERED = 10_000


class Merge:
    """Remembers what was told, and by whom."""

    def __init__(self) -> None:
        self._told: FIFOCache[tuple[str, ...], tuple[float, str]] = FIFOCache(_REMEMBERED)

    def is_news(self, event: ClusterEvent) -> bool:
        """Whether no other router has told it."""
        fact = (event.reason, event.subject, event.incarnation, event.request_id, event.detail)
        when, router = self._told.get(fact, (float("-inf"), event.router))
        if router != event.router and (event.reason in _ONCE or abs(event.time - when) < SAME_S):
            return False
        self._told[fact] = (event.time, event.router)
        return True

    def of(self, events: Iterable[ClusterEvent]) -> list[ClusterEvent]:
        """The news among them, the oldest first."""
        return [event for event in sorted(events, key=lambda event: event.time) if self.is_news(event)]

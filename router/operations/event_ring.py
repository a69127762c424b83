"""The latest events of the cluster for operators: numbered, bounded, and followed by any number of readers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from baton.messages.operator import ClusterEvent

MAX_EVENTS = 2048


class EventRing:
    """Keeps the latest events. Belongs to the event loop. A reader that falls far behind finds a gap in the numbers."""

    def __init__(self, router: str, wall: Callable[[], float], size: int = MAX_EVENTS) -> None:
        """`router`: this router's incarnation, which numbers the events; `wall`: returns seconds since the epoch."""
        self._router = router
        self._wall = wall
        self._events: deque[ClusterEvent] = deque(maxlen=size)
        self._last = 0
        self._changed = asyncio.Event()

    def record(
        self,
        reason: str,
        subject: str = "",
        *,
        incarnation: str = "",
        request_id: str = "",
        detail: str = "",
        is_warning: bool = False,
    ) -> None:
        """Add an event that happened now."""
        self._last += 1
        severity = "Warning" if is_warning else "Normal"
        self._events.append(
            ClusterEvent(
                self._last, self._wall(), severity, reason, subject, incarnation, request_id, detail, self._router
            )
        )
        self._changed.set()
        self._changed = asyncio.Event()

    def after(self, seq: int) -> list[ClusterEvent]:
        """The events with a larger number that are still kept, the oldest first."""
        if seq >= self._last:
            return []
        return [event for event in self._events if event.seq > seq]

    async def follow(self, seq: int) -> AsyncIterator[ClusterEvent]:
        """Yield the events that `after` returns, and then each new event. The iterator ends when it is closed."""
        while True:
            changed = self._changed
            for event in self.after(seq):
                seq = event.seq
                yield event
            if seq >= self._last:
                await changed.wait()

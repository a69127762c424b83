"""Virtual time: an event queue that stands for the machine's clock and timers. Its order depends on the seed alone."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Event:
    """A callback that is due at a time, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Drops the callback. Idempotent."""
        self.action = None


class Timeline:
    """A `Clock` for engines and `Timers` for the router. Events that are due at the same time keep their order."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual time in seconds."""
        self._due: list[tuple[float, int, Event]] = []
        self._count = 0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Event:
        """Schedules a callback for a time, or for now if that is past."""
        event = Event(callback)
        self._count += 1
        heapq.heappush(self._due, (when if when > self.now else self.now, self._count, event))
        return event

    def call_soon(self, callback: Callable[[], None], name: str) -> None:
        """Schedules a callback for now, after everything that is due now."""
        self.call_at(self.now, callback)

    def run(self) -> None:
        """Runs all events in order of time, until none is left."""
        due, pop = self._due, heapq.heappop
        while due:
            when, _, event = pop(due)
            action = event.action
            if action is not None:
                self.now = when
                event.action = None
                action()

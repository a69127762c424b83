"""Virtual time: what happens when, in one order that a seed decides. The fake beside the machine's clock and timers."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Event:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """It does not happen. Idempotent."""
        self.action = None


class Timeline:
    """A `Clock` for engines, `Timers` for the router. What is planned for one time happens in the order of planning."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self._due: list[tuple[float, int, Event]] = []
        self._count = 0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Event:
        """Have something happen at a time, at the earliest now."""
        event = Event(callback)
        self._count += 1
        heapq.heappush(self._due, (when if when > self.now else self.now, self._count, event))
        return event

    def call_soon(self, callback: Callable[[], None], name: str) -> None:
        """Have something happen now, after everything that is planned for now."""
        self.call_at(self.now, callback)

    def run(self) -> None:
        """Let everything happen, in order."""
        due, pop = self._due, heapq.heappop
        while due:
            when, _, event = pop(due)
            action = event.action
            if action is not None:
                self.now = when
                event.action = None
                action()

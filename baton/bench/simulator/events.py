"""Virtual time: an event queue that stands for the machine's clock and timers. Its order depends on the seed alone."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_KEPT_ENDS = 1 << 11


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


class StepEnds:
    """When a node's latest steps ended: the times of tokens that it drew in steps right after each other."""

    def __init__(self) -> None:
        self._ends = array("d")
        self._first = 0
        """The number of the first step that is kept."""
        self._num_kept = _KEPT_ENDS

    @property
    def next_step(self) -> int:
        """The number of the step that ends next."""
        return self._first + len(self._ends)

    def since(self, step: int) -> Sequence[float]:
        """The ends of all steps from this one on."""
        return self._ends[step - self._first :]

    def add(self, ends: Sequence[float], wanted: Iterable[int | None]) -> None:
        """Adds steps. Now and then those are dropped that are before all wanted ones."""
        self._ends.extend(ends)
        if len(self._ends) > 2 * self._num_kept:
            first = min((step for step in wanted if step is not None), default=self.next_step)
            del self._ends[: first - self._first]
            self._first = first
            self._num_kept = max(_KEPT_ENDS, len(self._ends))


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """A step or a run of steps, for plots. `kind`: prefill, decode or mixed; `tokens`: computed in it."""

    start_s: float
    end_s: float
    kind: str
    tokens: int

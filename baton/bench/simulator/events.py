"""Virtual time: an event queue that stands for the machine's clock and timers. Its order depends on the seed alone."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.bench.simulator.config import Contention

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


# Nodes on one machine: while several of them compute, each is slower, since they share memory and caches.
#
# A node computes at full speed while it is the only one that computes, and at a fraction of it while others compute,
# too.


class RunningStep:
    """A step that is being computed."""

    __slots__ = ("_host", "contention", "event", "left_s", "over", "since")

    def __init__(self, host: SharedHost, alone_s: float, contention: float, over: Callable[[], None]) -> None:
        self._host = host
        self.left_s = alone_s
        """Work left at `since`, in seconds at full speed."""
        self.contention = contention
        self.over = over
        self.since = 0.0
        self.event: Event | None = None

    def cancel(self) -> None:
        """Ends the step without calling `over`. Idempotent."""
        self._host.leave(self)


class SharedHost:
    """The steps of all nodes of one machine."""

    def __init__(self, timeline: Timeline, contention: Contention) -> None:
        self._timeline = timeline
        self._contention = contention
        self._running: dict[RunningStep, None] = {}

    def compute(self, alone_s: float, has_prompts: bool, over: Callable[[], None]) -> RunningStep:
        """Starts a step that takes `alone_s` at full speed; `over` is called when it ends."""
        contention = self._contention.prefill if has_prompts else self._contention.decode
        step = RunningStep(self, alone_s, contention, over)
        self._advance()
        self._running[step] = None
        self._schedule_ends()
        return step

    def leave(self, step: RunningStep) -> None:
        """Removes a step; the others get faster."""
        if step not in self._running:
            return
        self._advance()
        del self._running[step]
        if step.event is not None:
            step.event.cancel()
        self._schedule_ends()

    def _slower(self, step: RunningStep) -> float:
        return 1 + step.contention * (len(self._running) - 1)

    def _advance(self) -> None:
        """Updates the work left of all steps to now."""
        now = self._timeline.now
        for step in self._running:
            step.left_s -= (now - step.since) / self._slower(step)

    def _schedule_ends(self) -> None:
        """Schedules the end of each step, as if no other step started before it."""
        now = self._timeline.now
        for step in self._running:
            if step.event is not None:
                step.event.cancel()
            step.since = now
            step.event = self._timeline.call_at(
                now + max(0.0, step.left_s) * self._slower(step), partial(self._end, step)
            )

    def _end(self, step: RunningStep) -> None:
        self.leave(step)
        step.over()

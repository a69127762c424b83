"""Nodes on one machine: while several of them compute, each is slower, since they share memory and caches.

A node computes at full speed while it is the only one that computes, and at a fraction of it while others compute, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from baton.bench.simulator.config import Contention
from baton.bench.simulator.events import Event, Timeline


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

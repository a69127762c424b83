"""Nodes of one machine: while several of them compute, each is slower, since they share its memory and its caches.

A node that is alone computes at full speed. Beside others a step goes on at a fraction of it, from the moment on in
which another one begins, until that one ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from baton.bench.simulator.events import Event, Timeline


@dataclass(frozen=True, slots=True)
class Contention:
    """How many times as long steps take beside one node that computes all the while, less one; by kind of step."""

    prefill: float = 0.0
    """Also of a step with both kinds of work."""
    decode: float = 0.0


class Computing:
    """One step under way."""

    __slots__ = ("_host", "contention", "event", "left_s", "over", "since")

    def __init__(self, host: SharedHost, alone_s: float, contention: float, over: Callable[[], None]) -> None:
        self._host = host
        self.left_s = alone_s
        """What is to do, in seconds of a node that is alone, as of `since`."""
        self.contention = contention
        self.over = over
        self.since = 0.0
        self.event: Event | None = None

    def cancel(self) -> None:
        """It is given up. Idempotent."""
        self._host.leave(self)


class SharedHost:
    """All nodes of one machine."""

    def __init__(self, timeline: Timeline, contention: Contention) -> None:
        self._timeline = timeline
        self._contention = contention
        self._under_way: dict[Computing, None] = {}

    def compute(self, alone_s: float, has_prompts: bool, over: Callable[[], None]) -> Computing:
        """Have a step of so many seconds; `over` is called when it is."""
        contention = self._contention.prefill if has_prompts else self._contention.decode
        step = Computing(self, alone_s, contention, over)
        self._go_on()
        self._under_way[step] = None
        self._plan()
        return step

    def leave(self, step: Computing) -> None:
        """Nothing of it happens any more."""
        if step not in self._under_way:
            return
        self._go_on()
        del self._under_way[step]
        if step.event is not None:
            step.event.cancel()
        self._plan()

    def _slower(self, step: Computing) -> float:
        return 1 + step.contention * (len(self._under_way) - 1)

    def _go_on(self) -> None:
        """All of them get as far as they are now."""
        now = self._timeline.now
        for step in self._under_way:
            step.left_s -= (now - step.since) / self._slower(step)

    def _plan(self) -> None:
        """Nothing changes from now on until one of them ends."""
        now = self._timeline.now
        for step in self._under_way:
            if step.event is not None:
                step.event.cancel()
            step.since = now
            step.event = self._timeline.call_at(
                now + max(0.0, step.left_s) * self._slower(step), partial(self._end, step)
            )

    def _end(self, step: Computing) -> None:
        self.leave(step)
        step.over()

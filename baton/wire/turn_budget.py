"""Bounds the time per turn of the event loop that all connections of a process together may use for their input.

Input from an unknown client may cost far more to parse than to send. A bound per connection multiplies by the number of
connections; this one does not. It works like fair queueing (FQ-CoDel, RFC 8290): sources take turns in small steps, and
a source with new input comes before those that have had a step and need more. A client that floods delays only itself.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

TURN_S = 0.005
"""Seconds for input in each turn of the event loop. The last step may exceed them, since a step is not interrupted."""


class Source(Protocol):
    """A connection with input that waits to be parsed."""

    def step(self) -> bool:
        """Parse a small, bounded part of the input. Returns whether more can be done now. Raises nothing."""
        ...


class TurnBudget:
    """Lets sources step in turn until the time of the event loop's turn is used up, and continues in the next turn.

    All calls come from one event loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        turn_s: float = TURN_S,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._loop = loop
        self._turn_s = turn_s
        self._now = now
        self._fresh: deque[Source] = deque()
        """Sources that have not had a step since they were added."""
        self._busy: deque[Source] = deque()
        """Sources that had a step and have more to do."""
        self._spent_s = 0.0
        """Seconds that were spent in the present turn."""
        self._is_scheduled = False
        """Whether `_new_turn` is scheduled for the next turn."""
        # Steps start tasks, which must not inherit the context of the task that happened to call `step`.
        self._context = contextvars.copy_context()

    @property
    def num_waiting(self) -> int:
        """Sources with more to do."""
        return len(self._fresh) + len(self._busy)

    def step(self, source: Source) -> None:
        """Add a source that is not waiting. It steps at once if there is time and no other source waits."""
        self._fresh.append(source)
        self._schedule()
        if self.num_waiting == 1:
            self._step_in_turn()

    def step_later(self, source: Source) -> None:
        """Add a source that is not waiting, without a step before the next turn."""
        self._fresh.append(source)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._new_turn, context=self._context)

    def _new_turn(self) -> None:
        self._is_scheduled, self._spent_s = False, 0.0
        if self._fresh or self._busy:
            self._schedule()
            # One waiting source steps first, so that an endless series of new sources does not starve those that wait.
            if self._fresh and self._busy:
                self._let_step(self._busy)
            self._step_in_turn()

    def _step_in_turn(self) -> None:
        while self._spent_s < self._turn_s and (queue := self._fresh or self._busy):
            self._let_step(queue)

    def _let_step(self, queue: deque[Source]) -> None:
        source = queue.popleft()
        begun = self._now()
        has_more = source.step()
        self._spent_s += self._now() - begun
        if has_more:
            self._busy.append(source)

"""How much of one turn of the event loop all connections of a process may use together, and who comes first.

What a stranger sends may cost far more to take apart than to send. A bound for each connection multiplies by their
number; this one does not. It works as fair queueing does (FQ-CoDel, RFC 8290): sources take turns step by step, and who
has only just sent something comes before those who had a step and need more, so that who floods makes itself wait.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

TURN_S = 0.005
"""Of one turn. What one step takes comes on top, since nothing stops a step."""


class Source(Protocol):
    """A connection with input that waits to be taken apart."""

    def step(self) -> bool:
        """Do a small bounded piece of it; returns whether there is more that can be done now. Raises nothing."""
        ...


class TurnBudget:
    """Lets sources step one after the other until the turn's time is used up; the rest goes on in the turns to come.

    Belongs to one event loop.
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
        """Sources that have not had a step since they came."""
        self._busy: deque[Source] = deque()
        """Sources that had a step and have more to do."""
        self._spent_s = 0.0
        self._is_counting = False
        """Whether a call comes at the begin of the next turn."""
        # Steps begin tasks, and those must not inherit from whatever task happened to ask for the step.
        self._context = contextvars.copy_context()

    @property
    def num_waiting(self) -> int:
        """Sources with more to do."""
        return len(self._fresh) + len(self._busy)

    def step(self, source: Source) -> None:
        """Let a source that is not waiting yet step: at once if there is time, and nobody else waits."""
        self._fresh.append(source)
        self._count()
        if self.num_waiting == 1:
            self._go_on()

    def step_later(self, source: Source) -> None:
        """The same, but never at once: for callers in the middle of something."""
        self._fresh.append(source)
        self._count()

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._new_turn, context=self._context)

    def _new_turn(self) -> None:
        self._is_counting, self._spent_s = False, 0.0
        if self._fresh or self._busy:
            self._count()
            # First, so that newcomers without an end do not keep those that wait from having any.
            if self._fresh and self._busy:
                self._let_step(self._busy)
            self._go_on()

    def _go_on(self) -> None:
        while self._spent_s < self._turn_s and (queue := self._fresh or self._busy):
            self._let_step(queue)

    def _let_step(self, queue: deque[Source]) -> None:
        source = queue.popleft()
        begun = self._now()
        has_more = source.step()
        self._spent_s += self._now() - begun
        if has_more:
            self._busy.append(source)

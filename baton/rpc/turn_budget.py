"""How much of one turn of the event loop all connections of a kind may use together, and who comes first.

What a stranger sends may cost far more to take apart than to send. A bound for each connection multiplies by their
number; this one does not.
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
        self._waiting: deque[Source] = deque()
        self._spent_s = 0.0
        self._is_counting = False
        """Whether a call comes at the begin of the next turn."""
        # Steps begin tasks, and those must not inherit from whatever task happened to ask for the step.
        self._context = contextvars.copy_context()

    @property
    def num_waiting(self) -> int:
        """Sources with more to do."""
        return len(self._waiting)

    def step(self, source: Source) -> None:
        """Let a source that is not waiting yet step: at once if there is time, and nobody else waits."""
        self._waiting.append(source)
        self._count()
        if len(self._waiting) == 1:
            self._go_on()

    def step_later(self, source: Source) -> None:
        """The same, but never at once: for callers in the middle of something."""
        self._waiting.append(source)
        self._count()

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._new_turn, context=self._context)

    def _new_turn(self) -> None:
        self._is_counting, self._spent_s = False, 0.0
        if self._waiting:
            self._count()
            self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._spent_s < self._turn_s:
            source = self._waiting.popleft()
            begun = self._now()
            has_more = source.step()
            self._spent_s += self._now() - begun
            if has_more:
                self._waiting.append(source)

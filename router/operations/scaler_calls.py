"""Calls of a scaler: one at a time, beside the planner's turns, and each with an end."""

from __future__ import annotations

import asyncio

from baton.background import OnFault, start_background
from router.planner.scaling import Answer, Ask, Grow, Observe, Remove
from router.scalers.asking import ALL_POOLS
from router.scalers.scaler import CALL_S, Scaler, ScalerFailed, ScalerFault
from router.timers import Timers

DEADLINE_S = 2.0 * CALL_S + 5.0
"""A scaler bounds each of its calls, of which `scale` may make two. One that does not is given up."""


class ScalerCalls:
    """Asks one scaler. Belongs to the event loop."""

    def __init__(self, scaler: Scaler, timers: Timers) -> None:
        self._scaler = scaler
        self._timers = timers
        self._asked: Ask | None = None
        """What is being asked, or whose answer was not taken yet."""
        self._answer: Answer = None
        self._began_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether something may be asked."""
        return self._asked is None

    def start(self, ask: Ask) -> None:
        """Ask. Only while idle."""
        assert self.is_idle
        self._asked, self._began_at = ask, self._timers.monotonic()
        self._answer = ScalerFailed(ScalerFault.FAILED, ALL_POOLS, "an error of the scaler itself, see the log")
        self._task = start_background(lambda: self._call(ask), "scaler-call", on_fault=OnFault.GO_ON, may_end=True)

    def take(self) -> tuple[Ask, Answer] | None:
        """What was asked, and its answer or that none came in time. None: nothing was asked, or the call goes on."""
        if self._asked is None or self._task is None:
            return None
        asked = self._asked
        if self._task.done():
            self._asked = None
            return asked, self._answer
        if self._timers.monotonic() < self._began_at + DEADLINE_S:
            return None
        self.cancel()
        return asked, ScalerFailed(ScalerFault.TIMEOUT, ALL_POOLS, f"no answer within {DEADLINE_S:g} s")

    def cancel(self) -> None:
        """Give the call up; whether it has had its effect is not known."""
        if self._asked is not None and self._task is not None:
            self._asked = None
            self._task.cancel()
            self._ending.add(self._task)
            self._task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Give the call up, and wait for its end."""
        self.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _call(self, ask: Ask) -> None:
        answer: Answer = None
        try:
            match ask:
                case Observe():
                    answer = await self._scaler.observe()
                case Grow(pool, nodes):
                    await self._scaler.scale(pool, nodes)
                case Remove(name):
                    await self._scaler.remove(name)
        except ScalerFailed as error:
            answer = error
        if self._task is asyncio.current_task():
            self._answer = answer

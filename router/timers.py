"""The router's clock, and callbacks at times of that clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from baton.background import current_watch


class TimerHandle(Protocol):
    """A callback that has not run yet."""

    def cancel(self) -> None:
        """Cancel the callback. Idempotent; without effect once it has run."""
        ...


class Timers(Protocol):
    """A monotonic clock in seconds with timers; belongs to one event loop."""

    def monotonic(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Run the callback once at or after `when`."""
        ...

    def call_soon(self, callback: Callable[[], None], name: str) -> None:
        """Run the callback once in the next turn of the loop. `name` names it in the report of a fault."""
        ...


class LoopTimers:
    """The timers of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watch = current_watch.get()

    def monotonic(self) -> float:
        return self._loop.time()

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        return self._loop.call_at(when, self._watch.guarded(callback, "timer"))

    def call_soon(self, callback: Callable[[], None], name: str) -> None:
        self._loop.call_soon(self._watch.guarded(callback, name))


async def sleep_until(timers: Timers, when: float) -> None:
    """Wait until `when` or a little later."""
    woken = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    handle = timers.call_at(when, wake)
    try:
        await woken
    finally:
        handle.cancel()

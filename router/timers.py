"""Time for the router: a clock, and callbacks at a time of that clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from baton.background import current_watch


class TimerHandle(Protocol):
    """A callback that has not run yet."""

    def cancel(self) -> None:
        """Don't run it. Idempotent; without effect once it ran."""
        ...


class Timers(Protocol):
    """Where the router's time comes from. Seconds, monotonic; belongs to one event loop."""

    def monotonic(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Run the callback once at or after `when`."""
        ...

    def call_soon(self, callback: Callable[[], None], name: str) -> None:
        """Run the callback once in the next turn of the loop. `name` is what a report of its failure calls it."""
        ...


class LoopTimers:
    """The running event loop's clock."""

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
    """Return at or after `when`."""
    woken = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    handle = timers.call_at(when, wake)
    try:
        await woken
    finally:
        handle.cancel()

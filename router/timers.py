"""The router's clock, and callbacks at times of that clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
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


class NextTurn:
    """Does its work in the next turn of the loop, once, however often it is asked to."""

    def __init__(self, timers: Timers, work: Callable[[], None], name: str) -> None:
        """`name`: as in `Timers.call_soon`."""
        self._timers = timers
        self._work = work
        self._name = name
        self.is_due = False
        """Whether the next turn does the work."""

    def request(self) -> None:
        """Do the work in the next turn."""
        if not self.is_due:
            self.is_due = True
            self._timers.call_soon(self._run, self._name)

    def _run(self) -> None:
        self.is_due = False
        self._work()


async def first_of(*works: Coroutine[object, object, object]) -> None:
    """Wait until the first of these is done, and cancel the others. Raises the error with which one ended by then."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()


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

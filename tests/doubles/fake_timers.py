"""The fake of `router.timers.Timers`."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

from baton.background import current_watch
from router.timers import TimerHandle


class _Handle:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakeTimers:
    """Timers whose time a test moves forward with `advance`."""

    def __init__(self, start: float = 100.0) -> None:
        self._now = start
        self._order = itertools.count()
        self._due: list[tuple[float, int, _Handle]] = []
        self._scheduled = asyncio.Event()

    def monotonic(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        handle = _Handle(callback)
        heapq.heappush(self._due, (when, next(self._order), handle))
        self._scheduled.set()
        return handle

    def call_soon(self, callback: Callable[[], None], name: str) -> None:
        """Call it in the next turn of the running event loop, without moving the time."""
        asyncio.get_running_loop().call_soon(current_watch.get().guarded(callback, name))

    async def is_due(self, within: float) -> None:
        """Wait until a callback is due within this number of seconds."""
        while not any(h.callback is not None and when <= self._now + within for when, _, h in self._due):
            self._scheduled.clear()
            await self._scheduled.wait()

    @property
    def num_pending(self) -> int:
        """Number of callbacks that have neither run nor been cancelled."""
        return sum(1 for _, _, handle in self._due if handle.callback is not None)

    def advance(self, seconds: float) -> None:
        """Move the time forward, and run the callbacks that become due, in order."""
        target = self._now + seconds
        while self._due and self._due[0][0] <= target:
            when, _, handle = heapq.heappop(self._due)
            self._now = max(self._now, when)
            callback, handle.callback = handle.callback, None
            if callback is not None:
                callback()
        self._now = target

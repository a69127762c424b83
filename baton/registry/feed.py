"""A value that changes, and the watchers that wait for its next change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    """Gives the newest value to any number of watchers. All calls come from one event loop."""

    def __init__(self) -> None:
        self._latest: T | None = None
        self._version = 0
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def latest(self) -> T | None:
        """The newest value; None before the first one."""
        return self._latest

    def publish(self, value: T) -> None:
        """Make this the newest value. A value that equals the present one wakes no watcher."""
        if self._version and value == self._latest:
            return
        self._latest = value
        self._version += 1
        self._wake()

    def close(self) -> None:
        """End all watches."""
        self._closed = True
        self._wake()

    async def watch(self) -> AsyncIterator[T]:
        """Yield the newest value, and again each time that it has changed. A slow consumer misses values in between."""
        seen = 0
        while not self._closed:
            if self._version == seen or self._latest is None:
                await self._changed.wait()
                continue
            seen = self._version
            yield self._latest

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

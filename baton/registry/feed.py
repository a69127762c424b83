"""The latest value and those who wait for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    """Hands the newest value to any number of watchers. Belongs to one event loop."""

    def __init__(self) -> None:
        self._latest: T | None = None
        self._version = 0
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def latest(self) -> T | None:
        """None before the first."""
        return self._latest

    def publish(self, value: T) -> None:
        """Make this the latest one; an equal one wakes nobody."""
        if self._version and value == self._latest:
            return
        self._latest = value
        self._version += 1
        self._wake()

    def close(self) -> None:
        """End every watch."""
        self._closed = True
        self._wake()

    async def watch(self) -> AsyncIterator[T]:
        """Every value that is still the newest when it is asked for."""
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

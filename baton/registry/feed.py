"""The latest snapshot and those who wait for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton.registry.records import Snapshot


class SnapshotFeed:
    """Hands the newest snapshot to any number of watchers. Belongs to one event loop."""

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._version = 0
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def snapshot(self) -> Snapshot | None:
        """The latest one; None before the first."""
        return self._snapshot

    def publish(self, snapshot: Snapshot) -> None:
        """Make this the latest snapshot; an equal one wakes nobody."""
        if self._version and dict(snapshot) == dict(self._snapshot or {}):
            return
        self._snapshot = snapshot
        self._version += 1
        self._wake()

    def close(self) -> None:
        """End every watch."""
        self._closed = True
        self._wake()

    async def watch(self) -> AsyncIterator[Snapshot]:
        """Every snapshot that is still the newest when it is asked for."""
        seen = 0
        while not self._closed:
            if self._version == seen or self._snapshot is None:
                await self._changed.wait()
                continue
            seen = self._version
            yield self._snapshot

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

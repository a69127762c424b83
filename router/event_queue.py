"""What waits for one client: its events in order, then the end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from baton.errors import BatonError
from baton.rpc.messages import Chunk, GenerateEvent


class EventQueue:
    """Never blocks the writer; `backlog` says how far the reader is behind."""

    def __init__(self) -> None:
        self._events: deque[GenerateEvent] = deque()
        self._changed = asyncio.Event()
        self._is_over = False
        self._error: BatonError | None = None
        self.backlog = 0
        """Tokens that the reader has not taken."""

    def put(self, event: GenerateEvent) -> None:
        if isinstance(event, Chunk):
            self.backlog += len(event.token_ids)
        self._events.append(event)
        self._changed.set()

    def put_all(self, events: Iterable[GenerateEvent]) -> None:
        for event in events:
            self.put(event)

    def end(self, error: BatonError | None = None) -> None:
        """Nothing follows; with an error, `get` raises it once all events are taken. Only the first end counts."""
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._changed.set()

    @property
    def error(self) -> BatonError | None:
        """What it ends with, if that is an error."""
        return self._error

    async def get(self) -> GenerateEvent | None:
        """The next event, None after the last one; raises the error of the end."""
        while not self._events:
            if self._is_over:
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        event = self._events.popleft()
        if isinstance(event, Chunk):
            self.backlog -= len(event.token_ids)
        return event

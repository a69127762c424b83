"""What waits for one client: its events in order, then the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from baton.errors import BatonError
from baton.rpc.messages import Chunk, GenerateEvent
from router.turns import Turns

MAX_JOINED_TOKENS = 256


class EventQueue:
    """Never blocks the writer; `backlog` says how far the reader is behind.

    Chunks that wait are taken as one: a reader that falls behind gets fewer and larger ones, so it costs less the more
    there is to do. Chunks without tokens (text that was held back until the end) stay by themselves.
    """

    __slots__ = ("_error", "_events", "_is_over", "_turns", "_waiter", "backlog")

    def __init__(self, turns: Turns | None = None) -> None:
        """`turns` are those of all queues of a router."""
        self._turns = turns or Turns()
        self._events: list[GenerateEvent] = []
        """Few, since chunks are taken together; a deque would be 700 bytes for each stream."""
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False
        self._error: BatonError | None = None
        self.backlog = 0
        """Tokens that the reader has not taken."""

    def put(self, event: GenerateEvent) -> None:
        if isinstance(event, Chunk):
            self.backlog += len(event.token_ids)
        self._events.append(event)
        if self._waiter is not None:
            self._wake()

    def put_all(self, events: Iterable[GenerateEvent]) -> None:
        for event in events:
            self.put(event)

    def end(self, error: BatonError | None = None) -> None:
        """Nothing follows; with an error, `get` raises it once all events are taken. Only the first end counts."""
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._wake()

    @property
    def error(self) -> BatonError | None:
        """What it ends with, if that is an error."""
        return self._error

    async def get(self) -> GenerateEvent | None:
        """The next event, None after the last one; raises the error of the end. For one reader."""
        if not self._events or not self._turns.may_go():
            await self._turn()
        if not self._events:
            if self._error is not None:
                raise self._error
            return None
        event = self._events.pop(0)
        if isinstance(event, Chunk):
            if self._events and event.token_ids:
                event = self._joined(event)
            self.backlog -= len(event.token_ids)
        return event

    def _joined(self, first: Chunk) -> Chunk:
        """The chunk with those of its sequence that follow it at once."""
        chunks, num_tokens = [first], len(first.token_ids)
        for following in self._events:
            if num_tokens >= MAX_JOINED_TOKENS or not isinstance(following, Chunk) or not following.token_ids:
                break
            if following.sequence_index != first.sequence_index:
                break
            chunks.append(following)
            num_tokens += len(following.token_ids)
        if len(chunks) == 1:
            return first
        del self._events[: len(chunks) - 1]
        return Chunk(
            first.first_index,
            tuple(token for chunk in chunks for token in chunk.token_ids),
            "".join(chunk.text for chunk in chunks),
            tuple(position for chunk in chunks for position in chunk.logprobs),
            first.sequence_index,
        )

    async def _turn(self) -> None:
        """Return when there is something, or nothing more will come, and it is our turn."""
        waiter = self._turns.future()
        if self._events or self._is_over:
            self._turns.wake(waiter)
        else:
            self._waiter = waiter
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            self._turns.wake(waiter)

"""The events of a mover, for tests that wait for them."""

from __future__ import annotations

import queue
from typing import TypeVar

from baton.errors import TransferCause
from kv_transfer.mover.part_mover import MoverEvent, ReadDone, ReadFailed

WITHIN_S = 60.0
T = TypeVar("T")


class MoverEvents:
    """What a mover has delivered; `put` is what it is given for that."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[MoverEvent] = queue.SimpleQueue()
        self.put = self._queue.put

    def empty(self) -> bool:
        return self._queue.empty()

    def next(self) -> MoverEvent:
        return self._queue.get(timeout=WITHIN_S)

    def next_of(self, kind: type[T]) -> T:
        """The next event, which must be of this kind."""
        event = self.next()
        assert isinstance(event, kind), event
        return event

    def failure(self) -> tuple[int, TransferCause]:
        """The read that fails next, and why."""
        event = self.next_of(ReadFailed)
        return event.read_id, event.cause

    def answers(self, count: int) -> dict[int, type[MoverEvent]]:
        """The kinds of the next answers to so many reads, by read."""
        events = [self.next() for _ in range(count)]
        return {event.read_id: type(event) for event in events if isinstance(event, ReadDone | ReadFailed)}

    def left(self) -> list[MoverEvent]:
        """All events that were delivered and not taken yet."""
        return [self._queue.get() for _ in range(self._queue.qsize())]

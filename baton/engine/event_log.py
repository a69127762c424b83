"""A log of what happens to requests, kept until its reader takes the events."""

from __future__ import annotations

from collections import deque

from baton.clock import Clock
from baton.engine.batch import EngineCoreEvent, EngineCoreEventType


class EventLog:
    """A bounded list of events: when it is full the oldest events are dropped and counted."""

    def __init__(self, clock: Clock, capacity: int = 65536) -> None:
        self.is_recording = True
        """Whether the log has a reader; without one nothing is recorded."""
        self._clock = clock
        self._events: deque[EngineCoreEvent] = deque(maxlen=capacity)
        self.num_lost = 0

    def record(self, type: EngineCoreEventType, request_id: str, value: int = 0) -> None:
        """Append one event with the clock's present time."""
        if not self.is_recording:
            return
        self.num_lost += len(self._events) == self._events.maxlen
        self._events.append(EngineCoreEvent(type, request_id, self._clock.monotonic(), value))

    def take(self) -> list[EngineCoreEvent]:
        """All events since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

"""The node's latest events, kept in memory for `Node.Trace`, tests and benchmarks."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence

from baton.messages.ids import AttemptKey
from baton.messages.node_report import TraceEvent


class EventLog:
    """A bounded ring of events, which drops the oldest first. Any thread may record.

    Times are CLOCK_MONOTONIC, which all processes of a host share, so that logs of two nodes can be merged.
    """

    def __init__(self, capacity: int = 16_384) -> None:
        self._events: deque[TraceEvent] = deque(maxlen=capacity)
        self._seq = itertools.count(1)
        self._lock = threading.Lock()

    def record(self, name: str, attempt: AttemptKey, value: int = 0, detail: str = "") -> None:
        """Add an event that happens now."""
        with self._lock:
            self._events.append(TraceEvent(next(self._seq), time.monotonic_ns(), name, attempt, value, detail))

    def record_at(self, monotonic_s: float, name: str, attempt: AttemptKey, value: int = 0, detail: str = "") -> None:
        """Add an event that happened at `monotonic_s` (seconds, CLOCK_MONOTONIC)."""
        with self._lock:
            self._events.append(TraceEvent(next(self._seq), int(monotonic_s * 1e9), name, attempt, value, detail))

    def after(self, seq: int) -> Sequence[TraceEvent]:
        """The kept events with a sequence number above `seq`, oldest first."""
        with self._lock:
            return [event for event in self._events if event.seq > seq]

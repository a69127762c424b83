"""The node's latest events and engine steps, kept in memory for `Node.Trace`, tests, benchmarks and timelines."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from struct import Struct

from baton.messages.ids import AttemptKey
from baton.messages.node import StepFigures
from baton.messages.node_report import TraceEvent, TraceStep


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


_STEP = Struct("<qdQQQIII?")
"""One step: when it was committed (nanoseconds, CLOCK_MONOTONIC), the fields of `StepFigures` in their order, and
whether there was more to compute."""


class StepLog:
    """A bounded ring of steps, which drops the oldest first. Belongs to the event loop.

    It allocates its memory at once. If it grew with each step, a quiet node would look for hours as if it leaked.
    """

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity
        self._ring = bytearray(capacity * _STEP.size)
        self._num_steps = 0

    def record(self, ended_s: float, figures: StepFigures, goes_on: bool) -> None:
        """Add a step that was committed at `ended_s` (seconds, CLOCK_MONOTONIC); `goes_on`: more is to be computed."""
        _STEP.pack_into(
            self._ring,
            self._num_steps % self._capacity * _STEP.size,
            int(ended_s * 1e9),
            figures.step_ms,
            figures.prefill_tokens,
            figures.decode_sequences,
            figures.decode_context_tokens,
            figures.drafts,
            figures.draft_tokens,
            figures.accepted_tokens,
            goes_on,
        )
        self._num_steps += 1

    def after(self, seq: int) -> Sequence[TraceStep]:
        """The kept steps with a number above `seq`, oldest first."""
        first = max(seq, self._num_steps - self._capacity, 0)
        return [self._step(number) for number in range(first, self._num_steps)]

    def _step(self, number: int) -> TraceStep:
        ended_ns, *figures, goes_on = _STEP.unpack_from(self._ring, number % self._capacity * _STEP.size)
        return TraceStep(number + 1, ended_ns, StepFigures(*figures), goes_on)

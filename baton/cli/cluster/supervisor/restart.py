"""When a process that died is started again. Pure: time is an argument, waiting is an effect.

A death is answered at once, then ever more slowly (exponential back-off); a process that served for a while starts with
a clean sheet. One that dies again and again is in a crash loop: it is still tried, at the longest interval, and shown.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.machine import Machine

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 30.0
STABLE_S = 10.0
"""Having been ready for so long clears what happened before: it died of something else than its start, and is missed.
"""
LOOP_AFTER = 3
"""So many deaths in a row are a crash loop."""


class ChildState(enum.Enum):
    """Where a supervised process is in its life."""

    STARTING = enum.auto()
    READY = enum.auto()
    WAITING = enum.auto()
    STOPPING = enum.auto()
    STOPPED = enum.auto()


class ChildEvent(enum.Enum):
    """What happens to a supervised process."""

    BECAME_READY = enum.auto()
    EXITED = enum.auto()
    RETRY = enum.auto()
    STOP = enum.auto()


CHILD_TABLE = {
    (ChildState.STARTING, ChildEvent.BECAME_READY): ChildState.READY,
    (ChildState.STARTING, ChildEvent.EXITED): ChildState.WAITING,
    (ChildState.STARTING, ChildEvent.STOP): ChildState.STOPPING,
    (ChildState.READY, ChildEvent.EXITED): ChildState.WAITING,
    (ChildState.READY, ChildEvent.STOP): ChildState.STOPPING,
    (ChildState.WAITING, ChildEvent.RETRY): ChildState.STARTING,
    (ChildState.WAITING, ChildEvent.STOP): ChildState.STOPPED,
    (ChildState.STOPPING, ChildEvent.BECAME_READY): ChildState.STOPPING,
    (ChildState.STOPPING, ChildEvent.STOP): ChildState.STOPPING,
    (ChildState.STOPPING, ChildEvent.EXITED): ChildState.STOPPED,
    (ChildState.STOPPED, ChildEvent.STOP): ChildState.STOPPED,
}


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the process now."""


@dataclass(frozen=True, slots=True)
class RetryIn:
    """Wait so long, then feed RETRY."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the process to end."""


Effect = Spawn | RetryIn | Terminate | None


class ChildLife:
    """One supervised process through all its runs."""

    def __init__(self, name: str) -> None:
        self._machine = Machine(name, ChildState.STARTING, CHILD_TABLE)
        self._ready_at: float | None = None
        self._deaths_in_a_row = 0
        self._restarts = 0

    @property
    def state(self) -> ChildState:
        return self._machine.state

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self._restarts

    @property
    def status(self) -> str:
        """The operator's word."""
        state = self.state
        if state is ChildState.READY:
            return "Ready"
        if state is ChildState.STOPPING:
            return "Draining"
        if state is ChildState.STOPPED:
            return "Stopped"
        return "CrashLoop" if self._deaths_in_a_row >= LOOP_AFTER else "Starting"

    def became_ready(self, now: float) -> Effect:
        """It serves."""
        if self._machine.feed(ChildEvent.BECAME_READY) is ChildState.READY:
            self._ready_at = now
        return None

    def exited(self, now: float) -> Effect:
        """It is gone; `now` is monotonic seconds."""
        if self._machine.feed(ChildEvent.EXITED) is not ChildState.WAITING:
            return None
        if self._ready_at is not None and now - self._ready_at >= STABLE_S:
            self._deaths_in_a_row = 0
        self._ready_at = None
        self._deaths_in_a_row += 1
        return RetryIn(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self._deaths_in_a_row - 1, 32)))

    def retry(self) -> Effect:
        """The wait is over."""
        self._machine.feed(ChildEvent.RETRY)
        self._restarts += 1
        return Spawn()

    def stop(self) -> Effect:
        """It is to end for good. Idempotent."""
        return Terminate() if self._machine.feed(ChildEvent.STOP) is ChildState.STOPPING else None

"""Decides when a process that died is started again. Does no I/O: time is an argument, and waiting is an effect.

The delay before a start grows exponentially with the deaths in a row. A process that served for a while begins again
with the first delay. One that dies again and again is in a crash loop: it is shown as such, and still started again
after the longest delay.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.machine import Machine

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 30.0
STABLE_S = 10.0
"""A process that was ready for this long did not die of its start, so deaths before it no longer count."""
LOOP_AFTER = 3
"""This many deaths in a row are a crash loop."""


class ChildState(enum.Enum):
    """The states of a supervised process."""

    STARTING = enum.auto()
    READY = enum.auto()
    WAITING = enum.auto()
    STOPPING = enum.auto()
    STOPPED = enum.auto()


class ChildEvent(enum.Enum):
    """The events of a supervised process."""

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
    """Wait for `seconds`, then call `ChildLife.retry`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the process to end."""


Effect = Spawn | RetryIn | Terminate | None


class ChildLife:
    """The state of one supervised process over all of its runs."""

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
        """How often the process was started again."""
        return self._restarts

    @property
    def status(self) -> str:
        """The state as operators see it."""
        state = self.state
        if state is ChildState.READY:
            return "Ready"
        if state is ChildState.STOPPING:
            return "Draining"
        if state is ChildState.STOPPED:
            return "Stopped"
        return "CrashLoop" if self._deaths_in_a_row >= LOOP_AFTER else "Starting"

    def became_ready(self, now: float) -> Effect:
        """The process has announced that it is ready; `now` is monotonic seconds."""
        if self._machine.feed(ChildEvent.BECAME_READY) is ChildState.READY:
            self._ready_at = now
        return None

    def exited(self, now: float) -> Effect:
        """The process has ended; `now` is monotonic seconds."""
        if self._machine.feed(ChildEvent.EXITED) is not ChildState.WAITING:
            return None
        if self._ready_at is not None and now - self._ready_at >= STABLE_S:
            self._deaths_in_a_row = 0
        self._ready_at = None
        self._deaths_in_a_row += 1
        return RetryIn(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self._deaths_in_a_row - 1, 32)))

    def retry(self) -> Effect:
        """The delay before the next start has passed."""
        self._machine.feed(ChildEvent.RETRY)
        self._restarts += 1
        return Spawn()

    def stop(self) -> Effect:
        """End the process for good. Idempotent."""
        return Terminate() if self._machine.feed(ChildEvent.STOP) is ChildState.STOPPING else None

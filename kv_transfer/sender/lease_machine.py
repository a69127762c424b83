"""The states of a lease, on the sender, and what leads from one to another."""

from __future__ import annotations

import enum


class LeaseState(enum.Enum):
    """How sure the sender is that nobody reads the blocks."""

    GRANTED = enum.auto()
    """Held for a reader that has not subscribed: nobody reads."""
    READING = enum.auto()
    """The reader was told the blocks and lives: it may read."""
    SUSPECT = enum.auto()
    """The promise is over, but a read may still run."""
    RELEASED = enum.auto()
    """Nobody reads any more."""
    EXPIRED = enum.auto()
    """Nobody ever came."""


class LeaseEvent(enum.Enum):
    """What can happen to a lease."""

    OFFER = enum.auto()
    SUBSCRIBE = enum.auto()
    DEADLINE = enum.auto()
    LINK_LOST = enum.auto()
    GRACE_OVER = enum.auto()
    CONFIRM = enum.auto()
    ABANDON = enum.auto()
    ABANDON_READING = enum.auto()
    WITHDRAW = enum.auto()
    READER_GONE = enum.auto()


LEASE_TABLE: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.GRANTED, LeaseEvent.OFFER): LeaseState.GRANTED,
    (LeaseState.GRANTED, LeaseEvent.SUBSCRIBE): LeaseState.READING,
    (LeaseState.GRANTED, LeaseEvent.DEADLINE): LeaseState.EXPIRED,
    (LeaseState.GRANTED, LeaseEvent.WITHDRAW): LeaseState.RELEASED,
    (LeaseState.READING, LeaseEvent.OFFER): LeaseState.READING,
    (LeaseState.READING, LeaseEvent.DEADLINE): LeaseState.SUSPECT,
    (LeaseState.READING, LeaseEvent.LINK_LOST): LeaseState.SUSPECT,
    (LeaseState.READING, LeaseEvent.CONFIRM): LeaseState.RELEASED,
    (LeaseState.READING, LeaseEvent.ABANDON): LeaseState.RELEASED,
    (LeaseState.READING, LeaseEvent.ABANDON_READING): LeaseState.SUSPECT,
    (LeaseState.READING, LeaseEvent.WITHDRAW): LeaseState.SUSPECT,
    (LeaseState.READING, LeaseEvent.READER_GONE): LeaseState.RELEASED,
    (LeaseState.SUSPECT, LeaseEvent.OFFER): LeaseState.SUSPECT,
    (LeaseState.SUSPECT, LeaseEvent.LINK_LOST): LeaseState.SUSPECT,
    (LeaseState.SUSPECT, LeaseEvent.GRACE_OVER): LeaseState.RELEASED,
    (LeaseState.SUSPECT, LeaseEvent.CONFIRM): LeaseState.RELEASED,
    (LeaseState.SUSPECT, LeaseEvent.ABANDON): LeaseState.RELEASED,
    (LeaseState.SUSPECT, LeaseEvent.ABANDON_READING): LeaseState.SUSPECT,
    (LeaseState.SUSPECT, LeaseEvent.WITHDRAW): LeaseState.SUSPECT,
    (LeaseState.SUSPECT, LeaseEvent.READER_GONE): LeaseState.RELEASED,
}

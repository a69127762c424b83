"""The states of an attempt on its sender, before, during and after its lease, and what a lease book is given and
answers: bounds on its waits, effects, and figures about its leases."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

from baton.metric import Metric
from kv_transfer.effects import Recorded, Released
from kv_transfer.link.link_messages import SenderMessage


class LeaseState(enum.Enum):
    """The states of an attempt: whether its blocks may be read, and whether a reader still waits for it."""

    UNKNOWN = enum.auto()
    """Neither the engine nor a reader has named the attempt, or no reader waits for it any more. It has no record."""
    EXPECTED = enum.auto()
    """A reader waits for the attempt, whose request has no blocks here."""
    COMPUTING = enum.auto()
    """The request has its blocks and is being computed; nothing was offered yet."""
    GRANTED = enum.auto()
    """The lease is held for a reader that has not subscribed: no read runs."""
    READING = enum.auto()
    """The reader was told the blocks and lives: it may read."""
    SUSPECT = enum.auto()
    """The promise is over, but a read may still run."""
    AWAITING_DIGESTS = enum.auto()
    """The lease is over and its blocks are free; the reader is answered when the digests of all blocks are known."""
    OVERRUN = enum.auto()
    """The lease is over and its blocks are free, but its reader says that reads go on."""
    RELEASED = enum.auto()
    """The lease is over: no read runs, and no reader waits for an answer."""
    EXPIRED = enum.auto()
    """The lease is over: no reader ever came."""
    CANCELLED = enum.auto()
    """The attempt was given up before anything was offered."""

    __hash__ = object.__hash__  # by identity: Enum's own is a call into Python, in every lookup


class LeaseEvent(enum.Enum):
    """What can happen to an attempt, and who reports it."""

    EXPECT = enum.auto()
    """Reported by a reader: it will take the attempt in, and waits for its begin."""
    SUBSCRIBE = enum.auto()
    """Reported by a reader: it wants to be told the blocks."""
    READERS_LOST = enum.auto()
    """Reported by the book: no reader waits for the attempt any more."""
    BEGIN = enum.auto()
    """Reported by the engine: the request has all its blocks."""
    OFFER = enum.auto()
    """Reported by the engine: some blocks are computed."""
    WITHDRAW = enum.auto()
    """Reported by the engine, which has ended the request, or by a reader that waited and gives the attempt up."""
    END = enum.auto()
    """Reported by the engine: the request ended, and nothing of it was offered."""
    DIGESTED = enum.auto()
    """Reported by the engine: the digests of all blocks are known."""
    DIGESTS_LOST = enum.auto()
    """Reported by the engine: the digests of the blocks will never be known."""
    CONFIRM = enum.auto()
    """Reported by the reader: everything is read."""
    CONFIRM_UNDIGESTED = enum.auto()
    """Reported by the reader: everything is read, of which some digests are not known yet."""
    ABANDON = enum.auto()
    """Reported by the reader: it gives up, and none of its reads is in flight."""
    ABANDON_READING = enum.auto()
    """Reported by the reader: it gives up, and reads of it are in flight."""
    LINK_LOST = enum.auto()
    """Reported by the link: it has ended."""
    READER_GONE = enum.auto()
    """Reported by the check of a lost link: the reader's process does not exist any more."""
    DEADLINE = enum.auto()
    """Reported by the clock: no reader claimed the offer, or its reader was silent for too long."""
    GRACE_OVER = enum.auto()
    """Reported by the clock: reads of a suspect lease have had their time, and its reader has no link."""
    GRACE_OVER_READING = enum.auto()
    """Reported by the clock: reads of a suspect lease have had their time; its reader is there, and may still read."""

    __hash__ = object.__hash__


LEASE_TABLE: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.UNKNOWN, LeaseEvent.EXPECT): LeaseState.EXPECTED,
    (LeaseState.UNKNOWN, LeaseEvent.SUBSCRIBE): LeaseState.EXPECTED,
    (LeaseState.UNKNOWN, LeaseEvent.BEGIN): LeaseState.COMPUTING,
    (LeaseState.UNKNOWN, LeaseEvent.OFFER): LeaseState.GRANTED,
    (LeaseState.UNKNOWN, LeaseEvent.WITHDRAW): LeaseState.CANCELLED,
    # The attempt was over long ago.
    (LeaseState.UNKNOWN, LeaseEvent.ABANDON_READING): LeaseState.OVERRUN,
    (LeaseState.EXPECTED, LeaseEvent.EXPECT): LeaseState.EXPECTED,
    (LeaseState.EXPECTED, LeaseEvent.SUBSCRIBE): LeaseState.EXPECTED,
    (LeaseState.EXPECTED, LeaseEvent.READERS_LOST): LeaseState.UNKNOWN,
    (LeaseState.EXPECTED, LeaseEvent.BEGIN): LeaseState.COMPUTING,
    (LeaseState.EXPECTED, LeaseEvent.OFFER): LeaseState.GRANTED,
    (LeaseState.EXPECTED, LeaseEvent.WITHDRAW): LeaseState.CANCELLED,
    (LeaseState.COMPUTING, LeaseEvent.EXPECT): LeaseState.COMPUTING,
    (LeaseState.COMPUTING, LeaseEvent.SUBSCRIBE): LeaseState.COMPUTING,
    (LeaseState.COMPUTING, LeaseEvent.OFFER): LeaseState.GRANTED,
    (LeaseState.COMPUTING, LeaseEvent.WITHDRAW): LeaseState.CANCELLED,
    (LeaseState.COMPUTING, LeaseEvent.END): LeaseState.EXPECTED,
    (LeaseState.GRANTED, LeaseEvent.EXPECT): LeaseState.GRANTED,
    (LeaseState.GRANTED, LeaseEvent.SUBSCRIBE): LeaseState.READING,
    (LeaseState.GRANTED, LeaseEvent.OFFER): LeaseState.GRANTED,
    (LeaseState.GRANTED, LeaseEvent.WITHDRAW): LeaseState.RELEASED,
    (LeaseState.GRANTED, LeaseEvent.DEADLINE): LeaseState.EXPIRED,
    (LeaseState.READING, LeaseEvent.OFFER): LeaseState.READING,
    (LeaseState.READING, LeaseEvent.WITHDRAW): LeaseState.SUSPECT,
    (LeaseState.READING, LeaseEvent.CONFIRM): LeaseState.RELEASED,
    (LeaseState.READING, LeaseEvent.CONFIRM_UNDIGESTED): LeaseState.AWAITING_DIGESTS,
    (LeaseState.READING, LeaseEvent.ABANDON): LeaseState.RELEASED,
    (LeaseState.READING, LeaseEvent.ABANDON_READING): LeaseState.SUSPECT,
    (LeaseState.READING, LeaseEvent.LINK_LOST): LeaseState.SUSPECT,
    (LeaseState.READING, LeaseEvent.READER_GONE): LeaseState.RELEASED,
    (LeaseState.READING, LeaseEvent.DEADLINE): LeaseState.SUSPECT,
    (LeaseState.SUSPECT, LeaseEvent.OFFER): LeaseState.SUSPECT,
    (LeaseState.SUSPECT, LeaseEvent.WITHDRAW): LeaseState.SUSPECT,
    (LeaseState.SUSPECT, LeaseEvent.CONFIRM): LeaseState.RELEASED,
    (LeaseState.SUSPECT, LeaseEvent.CONFIRM_UNDIGESTED): LeaseState.AWAITING_DIGESTS,
    (LeaseState.SUSPECT, LeaseEvent.ABANDON): LeaseState.RELEASED,
    (LeaseState.SUSPECT, LeaseEvent.ABANDON_READING): LeaseState.SUSPECT,
    (LeaseState.SUSPECT, LeaseEvent.LINK_LOST): LeaseState.SUSPECT,
    (LeaseState.SUSPECT, LeaseEvent.READER_GONE): LeaseState.RELEASED,
    (LeaseState.SUSPECT, LeaseEvent.GRACE_OVER): LeaseState.RELEASED,
    (LeaseState.SUSPECT, LeaseEvent.GRACE_OVER_READING): LeaseState.OVERRUN,
    (LeaseState.AWAITING_DIGESTS, LeaseEvent.DIGESTED): LeaseState.RELEASED,
    (LeaseState.AWAITING_DIGESTS, LeaseEvent.DIGESTS_LOST): LeaseState.RELEASED,
    (LeaseState.AWAITING_DIGESTS, LeaseEvent.LINK_LOST): LeaseState.RELEASED,
    (LeaseState.OVERRUN, LeaseEvent.ABANDON): LeaseState.RELEASED,
    (LeaseState.OVERRUN, LeaseEvent.ABANDON_READING): LeaseState.OVERRUN,
    (LeaseState.OVERRUN, LeaseEvent.LINK_LOST): LeaseState.RELEASED,
}

HELD = (LeaseState.GRANTED, LeaseState.READING, LeaseState.SUSPECT)
"""While an attempt is in one of these its lease is out: the engine keeps the blocks."""

FINAL = (LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.CANCELLED)
"""The attempt is over, and nothing is kept but the memory of it."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Bounds of the sender's waits, in seconds, and of what it remembers."""

    lease_s: float = 10.0
    """How long a lease is promised for, from the reader's last heartbeat on."""
    unclaimed_s: float = 60.0
    """How long a computed prompt that no reader expects waits for its subscription. It is long, because a router or a
    reader that gives a request up says so; it bounds the case that all processes that knew of the request died."""
    grace_s: float = 5.0
    """How long blocks are kept after the end of the reader's link: reads of them may still run."""
    suspect_s: float = 300.0
    """How long blocks are kept after the end of the promise, while the reader's link lives and its reads don't end."""
    max_waiting: int = 4096
    """The most readers that may wait for a request to begin, the most that may wait for its first offer, and the most
    attempts that are followed because reads outlive their leases: each of the three has this bound."""
    remembered_s: float = 600.0
    """How long an attempt that is over is recognised. Every reader gives up asking about it earlier."""
    max_remembered: int = 16384
    """How many attempts that are over are recognised at most."""


@dataclass(frozen=True, slots=True)
class TellReader:
    """Send a message on a link."""

    link: int
    message: SenderMessage


@dataclass(frozen=True, slots=True)
class OpenLeases:
    """So many leases may be read from now on, those included that are over and still read: the sender's transfer agent
    must make progress while there are any."""

    count: int


@dataclass(frozen=True, slots=True)
class CutLink:
    """End this link: its reader has a newer one, or is a newer process."""

    link: int
    reason: str


LeaseEffect = TellReader | Released | OpenLeases | CutLink | Recorded


@dataclass(frozen=True, slots=True)
class LeaseStats:
    """Number of leases in each state, blocks of the suspect leases, and the age of the oldest lease in seconds.

    A field that declares a metric is on the prefill node's metrics page.
    """

    granted: Annotated[int, Metric("kv_leases", "Open leases, by state.", labels={"state": "granted"})]
    reading: Annotated[int, Metric("kv_leases", "Open leases, by state.", labels={"state": "reading"})]
    suspect: Annotated[int, Metric("kv_leases", "Open leases, by state.", labels={"state": "suspect"})]
    suspect_blocks: Annotated[
        int, Metric("kv_suspect_blocks", "Blocks of leases that are over though a reader may still read them.")
    ]
    oldest_s: Annotated[float, Metric("kv_lease_age_seconds", "Age of the oldest open lease; 0: there is none.")]

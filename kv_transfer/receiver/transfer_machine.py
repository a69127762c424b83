"""The states of a transfer on its receiver, and what leads from one to another."""

from __future__ import annotations

import enum


class TransferState(enum.Enum):
    """The states of a transfer: how far a prompt's KV has come."""

    PLANNED = enum.auto()
    """The sender is known; the link to it is being opened."""
    RESERVED = enum.auto()
    """Blocks for the whole prompt are reserved here and the sender was asked for the offer."""
    READING = enum.auto()
    """Some blocks were offered; they are being read, or were."""
    CONFIRMING = enum.auto()
    """Everything is read; the sender was asked whether it held its lease."""
    QUARANTINED = enum.auto()
    """The transfer is over, but reads may still write to its blocks."""
    ARRIVED = enum.auto()
    """The KV is here and proven."""
    FAILED = enum.auto()
    """The KV will not come, and no read writes any more."""
    ABANDONED = enum.auto()
    """Nobody wanted the KV any more, and no read writes any more."""


class TransferEvent(enum.Enum):
    """What can happen to a transfer, and who reports it."""

    SUBSCRIBED = enum.auto()
    """Reported by the book: the sender was asked for the blocks."""
    OFFER = enum.auto()
    """Reported by the sender: some blocks are computed."""
    READ_DONE = enum.auto()
    """Reported by the mover: all bytes of one read are here."""
    ALL_READ = enum.auto()
    """Reported by the book: everything was offered, and all reads are done."""
    HELD = enum.auto()
    """Reported by the sender: it held its lease through all reads."""
    FAIL = enum.auto()
    """Reported by the sender, the link, the mover or the book: the KV will not come, and no read is in flight."""
    FAIL_READING = enum.auto()
    """Reported like FAIL, while reads are in flight."""
    ABANDON = enum.auto()
    """Reported by the engine or the router: nobody wants the KV any more, and no read is in flight."""
    ABANDON_READING = enum.auto()
    """Reported like ABANDON, while reads are in flight."""
    READS_ENDED_FAILED = enum.auto()
    """Reported by the mover: the last read of a transfer that failed has ended."""
    READS_ENDED_ABANDONED = enum.auto()
    """Reported by the mover: the last read of a transfer that was abandoned has ended."""


TRANSFER_TABLE: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (TransferState.PLANNED, TransferEvent.SUBSCRIBED): TransferState.RESERVED,
    (TransferState.PLANNED, TransferEvent.FAIL): TransferState.FAILED,
    (TransferState.PLANNED, TransferEvent.ABANDON): TransferState.ABANDONED,
    (TransferState.RESERVED, TransferEvent.OFFER): TransferState.READING,
    (TransferState.RESERVED, TransferEvent.FAIL): TransferState.FAILED,
    (TransferState.RESERVED, TransferEvent.ABANDON): TransferState.ABANDONED,
    (TransferState.READING, TransferEvent.OFFER): TransferState.READING,
    (TransferState.READING, TransferEvent.READ_DONE): TransferState.READING,
    (TransferState.READING, TransferEvent.ALL_READ): TransferState.CONFIRMING,
    (TransferState.READING, TransferEvent.FAIL): TransferState.FAILED,
    (TransferState.READING, TransferEvent.FAIL_READING): TransferState.QUARANTINED,
    (TransferState.READING, TransferEvent.ABANDON): TransferState.ABANDONED,
    (TransferState.READING, TransferEvent.ABANDON_READING): TransferState.QUARANTINED,
    (TransferState.CONFIRMING, TransferEvent.HELD): TransferState.ARRIVED,
    (TransferState.CONFIRMING, TransferEvent.FAIL): TransferState.FAILED,
    (TransferState.CONFIRMING, TransferEvent.ABANDON): TransferState.ABANDONED,
    (TransferState.QUARANTINED, TransferEvent.READ_DONE): TransferState.QUARANTINED,
    (TransferState.QUARANTINED, TransferEvent.READS_ENDED_FAILED): TransferState.FAILED,
    (TransferState.QUARANTINED, TransferEvent.READS_ENDED_ABANDONED): TransferState.ABANDONED,
}

"""The states of a transfer, on the receiver, and what leads from one to another."""

from __future__ import annotations

import enum


class TransferState(enum.Enum):
    """How far a prompt's KV has come."""

    PLANNED = enum.auto()
    """The sender is known; the link to it is being opened."""
    RESERVED = enum.auto()
    """Blocks for the whole prompt are reserved here and the sender was asked for the offer."""
    READING = enum.auto()
    """Some blocks were offered; they are being read, or were."""
    CONFIRMING = enum.auto()
    """Everything is read; the sender was asked whether it held its lease."""
    QUARANTINED = enum.auto()
    """It is over, but reads may still write."""
    ARRIVED = enum.auto()
    FAILED = enum.auto()
    ABANDONED = enum.auto()


class TransferEvent(enum.Enum):
    """What can happen to a transfer. `..._READING`: while reads are in flight."""

    SUBSCRIBED = enum.auto()
    OFFER = enum.auto()
    READ_DONE = enum.auto()
    ALL_READ = enum.auto()
    HELD = enum.auto()
    FAIL = enum.auto()
    FAIL_READING = enum.auto()
    ABANDON = enum.auto()
    ABANDON_READING = enum.auto()
    READS_ENDED_FAILED = enum.auto()
    READS_ENDED_ABANDONED = enum.auto()


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

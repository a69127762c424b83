"""The records of a transfer book: one for each transfer, one for each read in flight, one for each sender."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.errors import TransferCause
from baton.machine import Machine
from baton.messages.kv_cache import NULL_BLOCK
from kv_transfer.link.link_messages import Closing, ReadConfirmed
from kv_transfer.receiver.transfer_machine import TransferEvent, TransferState
from kv_transfer.receiver.transfer_values import Plan


@dataclass(frozen=True, slots=True)
class Read:
    first_block: int
    """The first block of the prompt that it fills."""
    num_blocks: int


@dataclass(slots=True)
class Transfer:
    plan: Plan
    machine: Machine[TransferState, TransferEvent]
    planned_at: float
    next_block: int
    """Prompt blocks before it are valid or offered."""
    valid_end: int
    """Prompt blocks before it are valid, by rule 8."""
    asked_end: int
    """The sender was asked for its word on the prompt blocks before it, all of which are read."""
    reads: dict[int, Read] = field(default_factory=dict)
    """Reads in flight, by their ids."""
    to_digest: dict[int, set[int]] = field(default_factory=dict)
    """By read, the blocks whose digests are not known."""
    digests: dict[int, int] = field(default_factory=dict)
    """Of the blocks that were read."""
    sender_digests: list[int] = field(default_factory=list)
    """Digests of blocks from the plan's first on that the sender, by its own word, held through their reads."""
    answer: ReadConfirmed | None = None
    """The sender's word that it held its lease."""
    closing: Closing | None = None
    remote_blocks: set[int] = field(default_factory=set)
    num_bytes: int = 0
    num_blocks: int = 0
    read_s: float = 0.0
    cause: TransferCause | None = None
    ended: bool = False

    @property
    def peer(self) -> str:
        return self.plan.source.incarnation

    @property
    def num_reading(self) -> int:
        """Blocks that reads in flight may write to."""
        return sum(read.num_blocks for read in self.reads.values())

    @property
    def confirmed_end(self) -> int:
        """The sender has given its word on the prompt blocks before it."""
        return self.plan.first_block + len(self.sender_digests)

    @property
    def wanted_blocks(self) -> int:
        """Blocks that are to be filled; in quarantine, those that may still be written to."""
        if self.machine.state is TransferState.QUARANTINED:
            return self.num_reading
        return sum(block != NULL_BLOCK for block in self.plan.block_ids[self.plan.first_block :])


@dataclass(slots=True)
class Peer:
    num_blocks: int | None = None
    """None while its link is being opened."""

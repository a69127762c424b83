"""The records of a transfer book: one for each transfer, one for each read in flight, one for each sender. And what an
offer must be to be read for a transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.errors import TransferCause
from baton.machine import Machine
from baton.messages.ids import Peer
from baton.messages.kv_cache import NULL_BLOCK
from kv_transfer.link.link_messages import Closing, Expect, Offer, Pull, ReadConfirmed
from kv_transfer.receiver.block_map import BlockMap, SenderBlocks
from kv_transfer.receiver.transfer_values import TransferEvent, TransferPlan, TransferState


@dataclass(frozen=True, slots=True)
class ExpectedKV:
    """KV that a request waits for, which has no blocks reserved for it yet."""

    source: Peer
    question: Expect | Pull
    """What its sender is asked, on each link to it."""


@dataclass(frozen=True, slots=True)
class ReadInFlight:
    """One read that may still write to its local blocks."""

    first_block: int
    """The first of the sender's prompt blocks that it brings."""
    num_remote_blocks: int
    """Blocks of the sender that it brings."""
    local_blocks: frozenset[int]
    """The reader's blocks to which it writes; other reads may write to other parts of them."""


@dataclass(slots=True)
class Transfer:
    """The receiver's record of one attempt, from its plan until its final state.

    It counts the blocks of the prompt as the sender does (`blocks`), and only `plan` has this node's own.
    """

    plan: TransferPlan
    machine: Machine[TransferState, TransferEvent]
    planned_at: float
    blocks: SenderBlocks
    next_block: int
    """The prompt blocks before this one were offered, or were here already."""
    valid_end: int
    """The prompt blocks before this one are valid, by rule 8 of `transfer`."""
    confirm_part_end: int
    """The prompt blocks before this one are read, and the sender was asked to confirm them."""
    digest_parts: int = 1
    """How many digests the sender gives of each of its blocks, as its first offer says."""
    reads: dict[int, ReadInFlight] = field(default_factory=dict)
    """Reads in flight, by id."""
    to_digest: dict[int, set[int]] = field(default_factory=dict)
    """For each read, by id, the local sub-blocks whose digests are not known yet."""
    digests: dict[int, int] = field(default_factory=dict)
    """Digests of the local sub-blocks that were read, by their numbers in `SenderBlocks.digest_ids`."""
    sender_digests: list[int] = field(default_factory=list)
    """The sender's digests of the blocks that it has confirmed, from the first block that is missing here on."""
    read_confirmed: ReadConfirmed | None = None
    """The sender's answer that it held its lease through all reads; None before."""
    closing: Closing | None = None
    remote_blocks: set[int] = field(default_factory=set)
    """The sender's blocks that were read or are being read."""
    num_bytes: int = 0
    num_blocks: int = 0
    read_s: float = 0.0
    cause: TransferCause | None = None
    """Why the transfer failed; CANCELLED if it was abandoned."""
    request_ended: bool = False
    """The engine has ended the request, and keeps the blocks until they are released."""

    @property
    def state(self) -> TransferState:
        return self.machine.state

    @property
    def sender(self) -> str:
        """The incarnation of the sender's process."""
        return self.plan.source.incarnation

    @property
    def is_quarantined(self) -> bool:
        return self.machine.state is TransferState.QUARANTINED

    @property
    def num_reading(self) -> int:
        """Blocks that reads in flight may write to."""
        return len(frozenset[int]().union(*(read.local_blocks for read in self.reads.values())))

    @property
    def confirmed_end(self) -> int:
        """The sender has confirmed the prompt blocks before this one."""
        return self.blocks.first_block + len(self.sender_digests) // self.digest_parts

    @property
    def num_wanted_blocks(self) -> int:
        """Blocks that are to be filled; in quarantine, those that may still be written to."""
        if self.is_quarantined:
            return self.num_reading
        return sum(block != NULL_BLOCK for block in self.plan.block_ids[self.plan.first_block :])


@dataclass(slots=True)
class SenderLink:
    """The link to one sender, from the effect that opens it until its end."""

    num_blocks: int | None = None
    """Size of the sender's pool in blocks; None while the link is being opened."""
    block_map: BlockMap = field(default_factory=BlockMap)


def offer_objection(transfer: Transfer, offer: Offer, sender_blocks: int, vocab_size: int) -> str | None:
    """Why this offer can't be read, as an error message; None if it can.

    `sender_blocks`: number of blocks in the sender's pool. `vocab_size`: of this node's model.
    """
    blocks, end = transfer.blocks, offer.end_block
    if offer.first_block != transfer.next_block:
        return f"the offer begins at block {offer.first_block}, but block {transfer.next_block} is the next"
    if end > blocks.num_blocks:
        return f"the offer ends at block {end}, but the prompt has {blocks.num_blocks} blocks"
    is_first = transfer.state is TransferState.RESERVED
    if not blocks.divides(offer.digest_parts) or not (is_first or offer.digest_parts == transfer.digest_parts):
        return f"the offer has {offer.digest_parts} digests for each block, which can't be compared here"
    outside = [block for block in offer.block_ids if not 0 <= block < sender_blocks]
    if outside:
        return f"block {outside[0]} was offered, but the sender has {sender_blocks} blocks"
    pairs = zip(blocks.wanted(offer.first_block, end), offer.block_ids, strict=True)
    if any(remote == NULL_BLOCK and is_wanted for is_wanted, remote in pairs):
        return "a block that is wanted is not offered"
    offered = [block for block in offer.block_ids if block != NULL_BLOCK]
    if len(set(offered)) < len(offered) or not transfer.remote_blocks.isdisjoint(offered):
        return "the same block was offered twice"
    return _closing_objection(blocks, offer.closing, end, vocab_size) if offer.closing is not None else None


def _closing_objection(blocks: SenderBlocks, closing: Closing, end: int, vocab_size: int) -> str | None:
    plan, num_tokens = blocks.plan, blocks.plan.num_prompt_tokens
    if plan.num_known_tokens:
        least = plan.num_known_tokens + len(closing.first_token_ids) - 1
        size, groups = blocks.sizes.reader_block_size, len(blocks.sizes.windows)
        is_whole = end == -(-closing.num_prompt_tokens // size) * groups
        if not (closing.num_prompt_tokens == least < num_tokens and is_whole):
            return (
                f"a stream with KV of {closing.num_prompt_tokens} tokens in {end} blocks was offered, of which "
                f"{plan.num_known_tokens} are known here, with {len(closing.first_token_ids)} more"
            )
        return _token_objection(closing.first_token_ids, vocab_size)
    if closing.num_prompt_tokens != num_tokens or end != blocks.num_blocks:
        return (
            f"a prompt of {closing.num_prompt_tokens} tokens in {end} blocks was offered, "
            f"expected {num_tokens} tokens in {blocks.num_blocks}"
        )
    return None if blocks.plan.is_pull else _token_objection(closing.first_token_ids, vocab_size)


def _token_objection(token_ids: Sequence[int], vocab_size: int) -> str | None:
    if not token_ids:
        return "the closing offer has no first token"
    unknown = [token for token in token_ids if not 0 <= token < vocab_size]
    return f"the first token is {unknown[0]}, but the vocabulary has {vocab_size} tokens" if unknown else None

"""Checks an offer against the plan that it is to fill, before anything is read (rule 3 of `transfer`)."""

from __future__ import annotations

from collections.abc import Sequence

from baton.messages.kv_cache import NULL_BLOCK
from kv_transfer.link.link_messages import Closing, Offer
from kv_transfer.receiver.block_map import SenderBlocks
from kv_transfer.receiver.transfer_machine import TransferState
from kv_transfer.receiver.transfer_records import Transfer


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
    num_tokens = blocks.plan.num_prompt_tokens
    if closing.num_prompt_tokens != num_tokens or end != blocks.num_blocks:
        return (
            f"a prompt of {closing.num_prompt_tokens} tokens in {end} blocks was offered, "
            f"expected {num_tokens} tokens in {blocks.num_blocks}"
        )
    return _token_objection(closing.first_token_ids, vocab_size)


def _token_objection(token_ids: Sequence[int], vocab_size: int) -> str | None:
    if not token_ids:
        return "the closing offer has no first token"
    unknown = [token for token in token_ids if not 0 <= token < vocab_size]
    return f"the first token is {unknown[0]}, but the vocabulary has {vocab_size} tokens" if unknown else None

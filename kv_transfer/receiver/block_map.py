"""Turns a reader's plan into the sender's blocks, in which all messages of a link count. Pure.

The blocks of the two nodes may have different sizes; then the smaller size is that of a sub-block
(`kv_transfer/piece_plan.py`), and a block of the other node has several. An entry is one block of a prompt's table: for
each `block_size` tokens there is one of every group of layers, in the order of the groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from baton.engine.kv_cache.cache_groups import first_seen_token
from baton.messages.kv_cache import NULL_BLOCK
from kv_transfer.receiver.transfer_values import TransferPlan


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The block sizes of a sender and of this reader, of which one divides the other."""

    sender_block_size: int = 1
    reader_block_size: int = 1
    windows: Sequence[int | None] = (None,)
    """The attention window of each group of layers."""

    @property
    def sender_parts(self) -> int:
        """Sub-blocks in a block of the sender."""
        return max(1, self.sender_block_size // self.reader_block_size)

    @property
    def is_equal(self) -> bool:
        """Whether the blocks of both have as many tokens."""
        return self.sender_block_size == self.reader_block_size

    @property
    def reader_parts(self) -> int:
        """Sub-blocks in a block of the reader."""
        return max(1, self.reader_block_size // self.sender_block_size)

    def view(self, plan: TransferPlan) -> SenderBlocks:
        """The plan's entries as the sender counts them. Raises ValueError if the plan is not of its prompt's length."""
        if self.sender_block_size == self.reader_block_size:
            return SenderBlocks.of_equal_size(plan, self)
        groups, size = len(self.windows), min(self.sender_block_size, self.reader_block_size)
        num_tokens, first_token = plan.num_prompt_tokens, plan.first_block // groups * self.reader_block_size
        if len(plan.block_ids) != -(-num_tokens // self.reader_block_size) * groups:
            raise ValueError(f"{len(plan.block_ids)} blocks were planned for {num_tokens} tokens")
        parts = self.reader_parts
        blocks = np.array(plan.block_ids, np.int64).reshape(-1, groups)
        # [sub-blocks, groups]
        local = np.repeat(blocks, parts, axis=0) * parts + np.tile(np.arange(parts), len(blocks))[:, np.newaxis]
        local[np.repeat(blocks == NULL_BLOCK, parts, axis=0)] = NULL_BLOCK
        # Behind the prompt, in front of what is missing, and in front of the window nothing is wanted.
        local[-(-num_tokens // size) :] = NULL_BLOCK
        local[: first_token // size] = NULL_BLOCK
        partly_filled: list[int] = []
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            end = first_seen_token(num_tokens - 1, window) // size
            local[:end, group] = NULL_BLOCK
            cut = range(first_token // self.reader_block_size, -(-end // parts))
            partly_filled += [stripe * groups + group for stripe in cut if blocks[stripe, group] != NULL_BLOCK]
        num_stripes = -(-num_tokens // self.sender_block_size)
        view = np.full((num_stripes * self.sender_parts, groups), NULL_BLOCK, np.int64)
        view[: len(local)] = local[: len(view)]
        in_order = view.reshape(num_stripes, self.sender_parts, groups).transpose(0, 2, 1)
        return SenderBlocks(
            plan,
            self,
            first_token // self.sender_block_size * groups,
            num_stripes * groups,
            in_order.ravel().tolist(),
            tuple(partly_filled),
        )


@dataclass(frozen=True, slots=True)
class SenderBlocks:
    """A plan's entries as the sender counts them, and where the reader wants their sub-blocks."""

    plan: TransferPlan
    sizes: BlockMap
    first_block: int
    """The first entry of which something is missing."""
    num_blocks: int
    """Number of entries of the whole prompt."""
    local: Sequence[int]
    """The reader's sub-block for each sub-block of each entry; 0 where none is wanted."""
    partly_filled: Sequence[int] = ()
    """Indices of the plan's blocks of which the first sub-blocks are not wanted, since windows have passed them: the
    sender need not have those any more."""

    @classmethod
    def of_equal_size(cls, plan: TransferPlan, sizes: BlockMap) -> SenderBlocks:
        """The plan's own entries."""
        return cls(plan, sizes, plan.first_block, len(plan.block_ids), plan.block_ids)

    def wanted(self, first: int, end: int) -> Sequence[bool]:
        """For each entry from `first` on, whether anything of it is wanted."""
        parts = self.sizes.sender_parts
        places = self.local[first * parts : end * parts]
        return [any(places[at : at + parts]) for at in range(0, len(places), parts)]

    def reads(self, first: int, remote_blocks: Sequence[int]) -> Sequence[tuple[int, int, int]]:
        """What is wanted of the entries from `first` on, which are in these blocks of the sender.

        For each sub-block: its number here, its number at the sender, and its group of layers.
        """
        parts, groups = self.sizes.sender_parts, len(self.sizes.windows)
        end = first + len(remote_blocks)
        # An entry costs as little as possible here: a long prompt has thousands, and the event loop waits.
        group_of = itertools.cycle([*range(first % groups, groups), *range(first % groups)])
        if parts == 1:
            return [
                (local, remote, group)
                for local, remote, group in zip(self.local[first:end], remote_blocks, group_of, strict=False)
                if local != NULL_BLOCK
            ]
        return [
            (local, remote * parts + part, group)
            for entry, (remote, group) in enumerate(zip(remote_blocks, group_of, strict=False), first)
            for part in range(parts)
            if (local := self.local[entry * parts + part]) != NULL_BLOCK
        ]

    def divides(self, digest_parts: int) -> bool:
        """Whether digests of that many parts of each of the sender's blocks can be compared with what is here."""
        size, parts = self.sizes.sender_block_size, self.sizes.sender_parts
        return 0 < digest_parts <= size and size % digest_parts == 0 and digest_parts % parts == 0

    def local_digest_parts(self, digest_parts: int) -> int:
        """How many of those parts a block of the reader has."""
        return self.sizes.reader_parts * digest_parts // self.sizes.sender_parts

    def digest_ids(self, first: int, end: int, digest_parts: int) -> Sequence[int]:
        """Where the reader has each part of the entries from `first` to `end`; 0 where it is not wanted.

        Each of the sender's blocks has `digest_parts` of them. They are numbered `block * local_digest_parts + index`.
        """
        parts = self.sizes.sender_parts
        places, each = self.local[first * parts : end * parts], digest_parts // parts
        return (
            places if each == 1 else [block * each + index if block else 0 for block in places for index in range(each)]
        )

    def iter_digest_ids(self, first: int, end: int, digest_parts: int) -> Iterator[int]:
        """Yield what `digest_ids` returns, one by one."""
        local, parts = self.local, self.sizes.sender_parts
        each = digest_parts // parts
        for at in range(first * parts, end * parts):
            block = local[at]
            if each == 1:
                yield block
            else:
                yield from range(block * each, (block + 1) * each) if block else (0,) * each

    def reader_end(self, end: int) -> int:
        """How many leading blocks of the plan are complete with the entries before `end`."""
        sizes, groups = self.sizes, len(self.sizes.windows)
        if sizes.sender_block_size == sizes.reader_block_size:
            return end
        if end >= self.num_blocks:
            return len(self.plan.block_ids)
        num_tokens = end // groups * sizes.sender_block_size
        return max(self.plan.first_block, num_tokens // sizes.reader_block_size * groups)

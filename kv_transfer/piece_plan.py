"""Which bytes a read moves where: the plan of pieces between a sender's memory and a reader's. Pure.

Reads count sub-blocks, whose size is that of the smaller of the two block sizes (`baton/messages/kv_cache.py`): on the
side of the larger blocks a sub-block is a part of a block, on the other side a whole one. A memory may hold some layers
of each block; those that both memories hold are moved.

- Between equal sizes and equal layers both sides have whole blocks, and neighbouring blocks are one piece, whichever
  groups of layers they hold.
- Between equal sizes and different layers a block has one piece, since its common layers are neighbours on both sides.
- Between different sizes a sub-block has a piece for each head of each tensor, since in the larger block the tokens of
  other sub-blocks lie between them.

A plan could also take only some heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from baton.engine.runner import KVLayout
from baton.messages.kv_cache import block_sizes_fit
from baton.runner.blocks.sub_blocks import Division, Int64Array, SubBlockRows, sub_block_rows


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Neighbouring sub-blocks: `count` remote ones from `remote_block` on, to be read into those from `local_block` on.

    Between equal block sizes these are the numbers of blocks.
    """

    local_block: int
    remote_block: int
    count: int
    group: int = 0
    """The group of layers whose KV they hold."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes to be moved; an element of each array for each piece. Offsets are from the begin of each side's memory."""

    local: Int64Array
    remote: Int64Array
    lengths: Int64Array

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class _GroupRows:
    """The rows of a sub-block of one group, of the layers that are moved."""

    local_starts: Int64Array
    """Where they begin in the reader's block, in its first sub-block; those of the others follow, row by row."""
    remote_starts: Int64Array
    """The same in the sender's block."""
    lengths: Int64Array

    @classmethod
    def of(cls, local: SubBlockRows, remote: SubBlockRows) -> _GroupRows:
        return cls(local.starts, remote.starts, local.lengths)

    def of_whole_blocks(self) -> _GroupRows:
        """All rows as one: in a whole block those of neighbouring layers follow each other."""
        length = self.lengths.sum(keepdims=True)
        return _GroupRows(self.local_starts[:1], self.remote_starts[:1], length[: len(self.lengths)])

    @property
    def num_pieces(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """The plan of one pair of memories, of a sender and a reader."""

    common_layers: range
    """The layers that are moved, by their indices in the whole model; of blocks whose shape is not known, layer 0."""
    sub_block_bytes: int
    """Bytes that are moved of a sub-block; of the group of which most are."""
    local_parts: int
    """Sub-blocks in a block of the reader."""
    remote_parts: int
    """Sub-blocks in a block of the sender."""
    local_block_bytes: int
    remote_block_bytes: int
    _rows: Sequence[_GroupRows] = ()
    """By group; empty where whole blocks are moved."""
    _group_bytes: Sequence[int] = ()
    """Bytes that are moved of a sub-block of each group; empty where whole blocks are moved."""

    @classmethod
    def of_equal_blocks(cls, block_bytes: int, layers: range = range(1)) -> PiecePlan:
        """The plan between two memories with blocks of the same layout, which hold these layers."""
        return cls(layers, block_bytes, 1, 1, block_bytes, block_bytes)

    @classmethod
    def between(
        cls,
        reader: KVLayout,
        sender_block_size: int,
        reader_layers: range | None = None,
        sender_layers: range | None = None,
    ) -> PiecePlan:
        """The plan for a sender whose layout differs in nothing but its block size.

        The layouts are of all layers; each memory holds some of them, or all (None). Raises ValueError for sizes that
        don't fit, and for memories that have no layer in common.
        """
        ours, theirs = (range(reader.num_layers) if held is None else held for held in (reader_layers, sender_layers))
        common = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
        if common.start >= common.stop:
            raise ValueError(f"a memory with {_in_words(theirs)} has none of {_in_words(ours)}")
        local_bytes = reader.part(ours).block_bytes
        if sender_block_size == reader.block_size and theirs == ours:
            return cls.of_equal_blocks(local_bytes, common)
        if not block_sizes_fit(reader.block_size, sender_block_size):
            raise ValueError(f"blocks of {sender_block_size} tokens don't fit those of {reader.block_size}")
        sender = replace(reader, block_size=sender_block_size)
        tokens = min(reader.block_size, sender_block_size)
        local_parts, remote_parts = reader.block_size // tokens, sender_block_size // tokens
        rows = [
            _GroupRows.of(
                sub_block_rows(reader, Division(local_parts, group, common), ours),
                sub_block_rows(sender, Division(remote_parts, group, common), theirs),
            )
            for group in range(len(reader.groups))
        ]
        if local_parts == remote_parts:
            rows = [row.of_whole_blocks() for row in rows]
        sizes = tuple(row.num_bytes for row in rows)
        blocks = (local_bytes, sender.part(theirs).block_bytes)
        return cls(common, max(sizes), local_parts, remote_parts, *blocks, tuple(rows), sizes)

    @property
    def max_pieces(self) -> int:
        """The most pieces of a sub-block."""
        return max((rows.num_pieces for rows in self._rows), default=1)

    def count_sub_blocks(self, num_local_blocks: int, num_remote_blocks: int) -> tuple[int, int]:
        """How many sub-blocks so many blocks of the reader and of the sender have."""
        return num_local_blocks * self.local_parts, num_remote_blocks * self.remote_parts

    def count_pieces(self, ranges: Sequence[ReadRange]) -> int:
        """How many pieces these ranges have."""
        if not self._rows:
            return len(_merged(ranges))
        return sum(r.count * self._rows[r.group].num_pieces for r in ranges)

    def num_bytes(self, ranges: Sequence[ReadRange]) -> int:
        """How many bytes are moved for these ranges."""
        if not self._rows:
            return self.sub_block_bytes * sum(r.count for r in ranges)
        return sum(r.count * self._group_bytes[r.group] for r in ranges)

    def pieces(self, ranges: Sequence[ReadRange]) -> Pieces:
        """The pieces of these ranges. Each byte of a sub-block's layers is in one piece."""
        if not self._rows:
            local, remote, lengths = (np.array(_merged(ranges), np.int64).reshape(-1, 3) * self.sub_block_bytes).T
            return Pieces(local, remote, lengths)
        table = np.array([(r.local_block, r.remote_block, r.count, r.group) for r in ranges], np.int64).reshape(-1, 4)
        # One row for each sub-block.
        counts = table[:, 2]
        table, steps = np.repeat(table, counts, axis=0), np.arange(counts.sum())
        steps -= np.repeat(np.cumsum(counts) - counts, counts)
        pieces = [
            self._pieces_of(rows, *(table[table[:, 3] == group, :2] + steps[table[:, 3] == group, np.newaxis]).T)
            for group, rows in enumerate(self._rows)
        ]
        local, remote, lengths = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        return Pieces(local, remote, lengths)

    def _pieces_of(
        self, rows: _GroupRows, local: Int64Array, remote: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The pieces of sub-blocks of one group."""

        def offsets(sub_blocks: Int64Array, parts: int, block_bytes: int, starts: Int64Array) -> Int64Array:
            blocks, index = sub_blocks[:, np.newaxis] // parts, sub_blocks[:, np.newaxis] % parts
            return (blocks * block_bytes + starts + index * rows.lengths).ravel()

        return (
            offsets(local, self.local_parts, self.local_block_bytes, rows.local_starts),
            offsets(remote, self.remote_parts, self.remote_block_bytes, rows.remote_starts),
            np.tile(rows.lengths, len(local)),
        )


def _merged(ranges: Sequence[ReadRange]) -> list[tuple[int, int, int]]:
    """The local block, the remote block and the count of each range, or of several that follow each other.

    Blocks of different groups are in ranges of their own; as bytes they may still be neighbours.
    """
    merged: list[tuple[int, int, int]] = []
    for r in ranges:
        if merged:
            local, remote, count = merged[-1]
            if (local + count, remote + count) == (r.local_block, r.remote_block):
                merged[-1] = (local, remote, count + r.count)
                continue
        merged.append((r.local_block, r.remote_block, r.count))
    return merged


def _in_words(layers: range) -> str:
    return f"layers {layers.start} to {layers.stop - 1}"

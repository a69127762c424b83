"""An index of which nodes have which KV blocks: tens of millions of keys, and a prompt's prefix found on all nodes at
once.

A key is represented by one word, the first eight bytes of its SHA-256: among 10 million keys a wrong hit has a chance
of one in 10^12, and would cost a bad prediction, not a wrong token. A table is open-addressed and has a mask for each
word, with a bit for each of 64 nodes. The keys of a prompt are looked up together (numpy). A small number of keys goes
slot by slot through a memoryview, which is faster than numpy below some dozens.

No call takes long. A table grows, and drops the keys of nodes that have left, by moving into another one, some slots
with each change; meanwhile lookups read both. A node that dies gives up its bit at once; its keys are dropped by the
next move, and no other node gets the bit before that.

Only blocks of a model's first group of layers are counted (`group_key`). If that group has a window, a node may have a
longer prefix than the index says, but never a shorter one.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from baton.engine.kv_cache.block_hash import KEY_BYTES

Words = npt.NDArray[np.uint64]
FewOrMany = list[int] | Words
"""Words: up to _MAX_FEW as a list, more as an array."""
Places = npt.NDArray[np.int64]

NODES_PER_BANK = 64
_MIN_CAPACITY = 1 << 10
_MAX_FILL = 0.7
"""The largest used share of a table's slots: beyond that, many words are far from their bucket."""
_MAX_FEW = 72
"""Up to so many keys are looked up one by one."""
_MOVED_PER_CHANGE = 512
"""The slots that move with each change, which takes tens of microseconds."""
_WORDS = 4
"""Words in a bucket."""
_BUCKET = 2 * _WORDS
_FIRST_WORD = struct.Struct(f"<Q{KEY_BYTES - 8}x")
"""Unpacks the first word of a key."""
_OFFSETS = np.arange(_WORDS, _BUCKET)
"""The places of the masks in a bucket."""


class BlockIndex:
    """The keys of any number of nodes, in banks of 64. It has one writer."""

    def __init__(self, moved_per_change: int = _MOVED_PER_CHANGE) -> None:
        """`moved_per_change`: how many slots move with each change of a moving table (8 per added key, if more)."""
        self._moved_per_change = moved_per_change
        self._banks: list[_Bank] = []
        self._bank_of: dict[str, _Bank] = {}

    def __len__(self) -> int:
        """Number of keys over all nodes: a key of two nodes counts twice."""
        return sum(bank.num_keys for bank in self._banks)

    @property
    def is_empty(self) -> bool:
        return not any(bank.num_keys for bank in self._banks)

    def add(self, node: str, keys: Sequence[bytes]) -> None:
        """Add keys of a node."""
        words = _words(keys)
        if len(words):
            bank = self._bank_of.get(node) or self._join(node)
            bank.add(node, words)

    def remove(self, node: str, keys: Sequence[bytes]) -> None:
        """Remove keys of a node. Unknown ones are ignored."""
        bank = self._bank_of.get(node)
        if bank is not None:
            bank.remove(node, _words(keys))

    def forget(self, node: str) -> None:
        """Remove all keys of a node, in the same short time however many it has. Idempotent."""
        bank = self._bank_of.pop(node, None)
        if bank is not None:
            bank.leave(node)

    def count(self, node: str) -> int:
        """Number of keys of a node."""
        bank = self._bank_of.get(node)
        return bank.count(node) if bank is not None else 0

    def leading(self, keys: Sequence[bytes]) -> Mapping[str, int]:
        """How many leading keys each node has without a gap; nodes that lack the first key are left out."""
        if not keys or self.is_empty:
            return {}
        words = _words(keys)
        lengths: dict[str, int] = {}
        for bank in self._banks:
            if bank.num_keys:
                bank.leading(words, lengths)
        return lengths

    def _join(self, node: str) -> _Bank:
        bank = next((bank for bank in self._banks if bank.has_room), None)
        if bank is None:
            bank = _Bank(self._moved_per_change)
            self._banks.append(bank)
        bank.join(node)
        self._bank_of[node] = bank
        return bank


class _Bank:
    """The keys of up to 64 nodes, each of which has one bit of the masks."""

    def __init__(self, moved_per_change: int) -> None:
        self._moved_per_change = moved_per_change
        self._table = _Table(_MIN_CAPACITY)
        self._old: _Table | None = None
        """The table that is being moved into `_table`, if one is."""
        self._cursor = 0
        self._bits: dict[str, int] = {}
        self._nodes: list[str | None] = [None] * NODES_PER_BANK
        """The node of each bit."""
        self._counts: dict[str, int] = {}
        self._free = list(range(NODES_PER_BANK))
        self._retired: list[int] = []
        """Bits whose nodes have left; masks may still have them."""
        self._leaving: list[int] = []
        """Retired bits that no mask has any more once the current move ends."""
        self.num_keys = 0

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def count(self, node: str) -> int:
        return self._counts[node]

    def join(self, node: str) -> None:
        self._bits[node] = bit = self._free.pop()
        self._nodes[bit] = node
        self._counts[node] = 0

    def leave(self, node: str) -> None:
        bit, count = self._bits.pop(node), self._counts.pop(node)
        self._nodes[bit] = None
        self.num_keys -= count
        if count == 0:
            self._free.append(bit)
            return
        self._retired.append(bit)
        if len(self._free) < NODES_PER_BANK // 4:
            self._begin_move()

    def add(self, node: str, words: FewOrMany) -> None:
        self._make_room(len(words))
        bit = 1 << self._bits[node]
        if self._old is not None:
            # A key must be in one table only, so that it is counted once and removed at once.
            self._move(max(self._moved_per_change, 8 * len(words)))
        known = self._old.remove(words, bit) if self._old is not None else 0
        new = self._table.add(words, bit) - known
        self._counts[node] += new
        self.num_keys += new

    def remove(self, node: str, words: FewOrMany) -> None:
        bit = 1 << self._bits[node]
        gone = self._table.remove(words, bit)
        if self._old is not None:
            gone += self._old.remove(words, bit)
            self._move(self._moved_per_change)
        self._counts[node] -= gone
        self.num_keys -= gone

    def leading(self, words: FewOrMany, lengths: dict[str, int]) -> None:
        if isinstance(words, list):
            self._leading_few(words, lengths)
        elif self._mask(int(words[0])):
            self._leading_many(words, lengths)

    def _mask(self, word: int) -> int:
        mask = self._table.mask(word)
        return mask | self._old.mask(word) if self._old is not None else mask

    def _leading_few(self, words: list[int], lengths: dict[str, int]) -> None:
        table, old, before = self._table, self._old, (1 << NODES_PER_BANK) - 1
        for number, word in enumerate(words):
            mask = table.mask(word)
            if old is not None:
                mask |= old.mask(word)
            mask &= before
            if mask != before and number:
                self._note_length(before & ~mask, number, lengths)
            before = mask
            if not mask:
                return
        self._note_length(before, len(words), lengths)

    def _leading_many(self, words: Words, lengths: dict[str, int]) -> None:
        masks = self._table.masks(words)
        if self._old is not None:
            masks |= self._old.masks(words)
        # Mask i has the nodes with all of the keys up to i: nodes drop out one after the other.
        np.bitwise_and.accumulate(masks, out=masks)
        last = masks.size
        ends = [*(np.flatnonzero(masks[1:] != masks[:-1]) + 1).tolist(), last]
        for end in ends:
            self._note_length(int(masks[end - 1]) & ~(int(masks[end]) if end < last else 0), end, lengths)

    def _note_length(self, mask: int, length: int, lengths: dict[str, int]) -> None:
        """Note for each node of the mask that it has so many leading keys."""
        while mask:
            lowest = mask & -mask
            mask ^= lowest
            node = self._nodes[lowest.bit_length() - 1]
            if node is not None:
                lengths[node] = length

    def _live_mask(self) -> np.uint64:
        return np.uint64(sum(1 << bit for bit in self._bits.values()))

    def _make_room(self, count: int) -> None:
        while self._table.num_used + count > _MAX_FILL * self._table.capacity:
            if self._old is not None:
                self._move(self._old.capacity)
            self._begin_move(count)

    def _begin_move(self, more: int = 0) -> None:
        if self._old is not None:
            return
        # An upper bound: a key of two nodes counts twice. Nearly as many must fit again, or the next move comes soon.
        wanted = 1.8 * min(self.num_keys, self._table.num_used) + 2 * more
        capacity = _MIN_CAPACITY
        while capacity * _MAX_FILL < wanted:
            capacity *= 2
        self._old, self._table, self._cursor = self._table, _Table(capacity), 0
        self._leaving, self._retired = self._retired, []

    def _move(self, num_slots: int) -> None:
        old = self._old
        assert old is not None
        end = min(self._cursor + num_slots, old.capacity)
        words, masks = old.take(self._cursor, end)
        masks &= self._live_mask()
        there = masks != 0
        self._table.merge(words[there], masks[there])
        self._cursor = end
        if end == old.capacity:
            self._old = None
            self._free += self._leaving
            self._leaving = []


class _Table:
    """An open-addressed table of buckets, each with four words and then their masks: one line of the processor's cache.

    Buckets fill in order. A word is in its own bucket, or in a later one if that was full, and stays there, also when
    its mask is empty. A place is a mask's index in the flat array; the place after all buckets is for unknown words.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_used = 0
        self._last = capacity // _WORDS - 1
        self._nowhere = 2 * capacity
        self._flat = _zeros(2 * capacity + _BUCKET)
        self._buckets = self._flat.reshape(-1, _BUCKET)
        self._view = memoryview(self._flat)  # type: ignore[arg-type]

    def add(self, words: FewOrMany, bit: int) -> int:
        """Set the bit of each word; returns for how many words it was not set before."""
        if isinstance(words, list):
            return self._add_few(words, bit)
        places, mask = self._claim(np.unique(words)), np.uint64(bit)
        masks = self._flat[places]
        self._flat[places] = masks | mask
        return int(np.count_nonzero((masks & mask) == 0))

    def remove(self, words: FewOrMany, bit: int) -> int:
        """Clear the bit of each word; returns for how many words it was set before."""
        if isinstance(words, list):
            return self._remove_few(words, bit)
        places, mask = self._find(np.unique(words)), np.uint64(bit)
        masks = self._flat[places]
        self._flat[places] = masks & ~mask
        return int(np.count_nonzero(masks & mask))

    def mask(self, word: int) -> int:
        """The mask of a word; 0 for an unknown one."""
        view, first = self._view, (word & self._last) * _BUCKET
        while True:
            for slot in range(first, first + _WORDS):
                stored = view[slot]
                if stored == word:
                    return int(view[slot + _WORDS])
                if stored == 0:
                    return 0
            first = (first + _BUCKET) % self._nowhere

    def masks(self, words: Words) -> Words:
        """The mask of each word; 0 for an unknown one."""
        return self._flat[self._find(words)]

    def merge(self, words: Words, masks: Words) -> None:
        """Add the bits of each mask to that of its word. The words are all different."""
        self._flat[self._claim(words)] |= masks

    def take(self, first: int, end: int) -> tuple[Words, Words]:
        """Take the words and masks out of these slots (whole buckets), whose masks are empty from then on."""
        buckets = self._buckets[first // _WORDS : end // _WORDS]
        words, masks = buckets[:, :_WORDS].flatten(), buckets[:, _WORDS:].flatten()
        buckets[:, _WORDS:] = 0
        return words, masks

    def _add_few(self, words: list[int], bit: int) -> int:
        view, last, new = self._view, self._last, 0
        for word in words:
            slot = (word & last) * _BUCKET
            end = slot + _WORDS
            while (stored := view[slot]) != word:
                if stored == 0:
                    view[slot] = word
                    self.num_used += 1
                    break
                slot += 1
                if slot == end:
                    slot = (slot + _WORDS) % self._nowhere
                    end = slot + _WORDS
            offset = slot + _WORDS
            mask = view[offset]
            if not mask & bit:
                view[offset] = mask | bit
                new += 1
        return new

    def _remove_few(self, words: list[int], bit: int) -> int:
        view, last, gone = self._view, self._last, 0
        for word in words:
            slot = (word & last) * _BUCKET
            end = slot + _WORDS
            while (stored := view[slot]) != word and stored:
                slot += 1
                if slot == end:
                    slot = (slot + _WORDS) % self._nowhere
                    end = slot + _WORDS
            offset = slot + _WORDS
            if stored and view[offset] & bit:
                view[offset] ^= bit
                gone += 1
        return gone

    def _find(self, words: Words) -> Places:
        """The place of each word."""
        buckets = (words & np.uint64(self._last)).view(np.int64)
        places, open_ = self._find_in(buckets, words)
        while open_.size:
            buckets[open_] = (buckets[open_] + 1) & self._last
            places[open_], still = self._find_in(buckets[open_], words[open_])
            open_ = open_[still]
        return places

    def _find_in(self, buckets: Places, words: Words) -> tuple[Places, Places]:
        """The place of each word that is in its bucket, and the indices of words that may be in a later one."""
        rows = self._buckets.take(buckets, axis=0)
        offsets = (rows[:, :_WORDS] == words[:, np.newaxis]) @ _OFFSETS
        places = np.where(offsets, buckets * _BUCKET + offsets, self._nowhere)
        return places, np.flatnonzero((offsets == 0) & (rows[:, _WORDS - 1] != 0))

    def _claim(self, words: Words) -> Places:
        """The place of each word, which is added if it is new. The words are all different."""
        buckets = (words & np.uint64(self._last)).view(np.int64)
        places = np.empty(words.size, dtype=np.int64)
        open_ = np.arange(words.size)
        while open_.size:
            here, wanted = buckets[open_], words[open_]
            rows = self._buckets.take(here, axis=0)[:, :_WORDS]
            offsets = (rows == wanted[:, np.newaxis]) @ _OFFSETS
            num_full = np.count_nonzero(rows, axis=1)
            is_new = (offsets == 0) & (num_full < _WORDS)
            slots = here * _BUCKET + np.where(is_new, num_full, offsets - _WORDS)
            # If several words want one slot, the last of them gets it, and the others look again.
            self._flat[slots[is_new]] = wanted[is_new]
            has_place = (offsets != 0) | (is_new & (self._flat[slots] == wanted))
            self.num_used += int(np.count_nonzero(is_new & has_place))
            places[open_[has_place]] = slots[has_place] + _WORDS
            buckets[open_[~has_place & ~is_new]] += 1
            buckets &= self._last
            open_ = open_[~has_place]
        return places


def _zeros(count: int) -> Words:
    """An array of zeros that gets its memory page by page, when it is first written.

    numpy's function asks for huge pages, one of which can take the kernel a tenth of a second.
    """
    memory = mmap.mmap(-1, count * 8)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint64)


def _words(keys: Sequence[bytes]) -> FewOrMany:
    """The word of each key of the first group; 0, which marks an empty slot, becomes 1."""
    if len(keys) <= _MAX_FEW:
        joined = b"".join(keys)
        if len(joined) != KEY_BYTES * len(keys):
            # Keys of other groups are longer.
            joined = b"".join([key for key in keys if len(key) == KEY_BYTES])
        few = [word for (word,) in _FIRST_WORD.iter_unpack(joined)]
        return [word or 1 for word in few] if 0 in few else few
    joined = b"".join([key for key in keys if len(key) == KEY_BYTES])
    words = np.frombuffer(joined, dtype="<u8")[:: KEY_BYTES // 8].astype(np.uint64)
    words[words == 0] = 1
    return words

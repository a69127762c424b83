"""Groups of layers with attention windows: which blocks of a table are needed, and how a cached prefix is found.

A table has a stripe for each `block_size` tokens of its request: one entry of every group, in the order of the groups.
A query "sees" the keys that are within its group's window.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.kv_cache.block_hash import group_key
from baton.engine.kv_cache.block_pool import Block, BlockPool


def first_seen_token(position: int, window: int) -> int:
    """The position of the first key that a query at `position` sees, if it sees `window` keys, itself included."""
    return max(0, position - window + 1)


class CacheGroups:
    """The groups of one engine's model and its block pool, which is only read here."""

    def __init__(self, pool: BlockPool, block_size: int, windows: Sequence[int | None]) -> None:
        """`windows`: for each group, how many keys its queries see, themselves included; None: all."""
        self._pool = pool
        self._block_size = block_size
        self._num_groups = len(windows)
        self._sees_all = [group for group, window in enumerate(windows) if window is None]
        self.windows = [(group, window) for group, window in enumerate(windows) if window is not None]
        """(group, window) of the groups that have a window."""

    def first_seen(self, position: int, window: int) -> int:
        """The index of the first stripe with a key that a query at `position` sees."""
        return first_seen_token(position, window) // self._block_size

    def num_held(self, num_stripes: int, num_chunk_tokens: int) -> int:
        """The most entries that a request of `num_stripes` holds while it is computed in chunks of `num_chunk_tokens`.

        For a group with a window: the stripes that a query sees and those that a chunk adds, each of which may begin in
        the middle of one more stripe.
        """
        held = num_stripes * len(self._sees_all)
        for _, window in self.windows:
            held += min(
                num_stripes, -(-(window - 1) // self._block_size) + -(-num_chunk_tokens // self._block_size) + 2
            )
        return held

    def unseen_entries(self, entries: range, query: int) -> set[int]:
        """Return which of `entries` no query from position `query` on sees."""
        unseen: set[int] = set()
        for group, window in self.windows:
            end = self.first_seen(query, window) * self._num_groups
            first = entries.start + (group - entries.start) % self._num_groups
            unseen.update(range(first, min(end, entries.stop), self._num_groups))
        return unseen

    def without_null(self, blocks: list[Block]) -> list[Block]:
        """The blocks of these entries, without the null block."""
        if not self.windows:
            return blocks
        null = self._pool.null_block
        return [block for block in blocks if block is not null]

    def entry_keys(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The keys of the entries in stripes with these keys."""
        if self._num_groups == 1:
            return keys
        return [group_key(key, group) for key in keys for group in range(self._num_groups)]

    def find(self, keys: Sequence[bytes]) -> list[Block]:
        """The entries of the longest cached prefix of stripes with these keys.

        A prefix is found if all entries that a query behind it sees are in the cache; the null block stands for the
        other entries.
        """
        return self._find_in_windows(keys) if self.windows else self._find_chain(keys)

    def _find_chain(self, keys: Sequence[bytes]) -> list[Block]:
        blocks: list[Block] = []
        for key in self.entry_keys(keys):
            block = self._pool.get_cached_block(key)
            if block is None:
                break
            blocks.append(block)
        return blocks[: len(blocks) // self._num_groups * self._num_groups]

    def _find_in_windows(self, keys: Sequence[bytes]) -> list[Block]:
        num_stripes = self._longest_seen(keys)
        blocks = [self._pool.null_block] * (num_stripes * self._num_groups)
        first_seen = [0] * self._num_groups
        for group, window in self.windows:
            first_seen[group] = self.first_seen(num_stripes * self._block_size, window)
        for group, first in enumerate(first_seen):
            for stripe in range(first, num_stripes):
                block = self._pool.get_cached_block(group_key(keys[stripe], group))
                assert block is not None
                blocks[stripe * self._num_groups + group] = block
        return blocks

    def _longest_seen(self, keys: Sequence[bytes]) -> int:
        """The stripes of the longest prefix of which the cache has all entries that a query behind it sees."""
        num_stripes = len(keys)
        for group in self._sees_all:
            here = (self._is_cached(key, group) for key in keys[:num_stripes])
            num_stripes = next((stripe for stripe, cached in enumerate(here) if not cached), num_stripes)
        before = -1
        while num_stripes != before:
            before = num_stripes
            for group, window in self.windows:
                num_stripes = self._longest_in_window(keys, group, window, num_stripes)
        return num_stripes

    def _longest_in_window(self, keys: Sequence[bytes], group: int, window: int, num_stripes: int) -> int:
        """The longest such prefix for one group alone, at most `num_stripes`.

        Searches from the end, since often only the last entries of a prefix are still cached.
        """
        end = num_stripes
        for stripe in range(num_stripes - 1, -1, -1):
            if stripe < self.first_seen(end * self._block_size, window):
                return end
            if not self._is_cached(keys[stripe], group):
                end = stripe
        return end

    def _is_cached(self, key: bytes, group: int) -> bool:
        return self._pool.get_cached_block(group_key(key, group)) is not None

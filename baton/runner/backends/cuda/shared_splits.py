"""Finds the sequences of a decode step that share leading blocks, so that a GPU's attention walks these blocks once.

The same block numbers at the beginning of two tables mean the same keys. Sorted by their tables, sequences that share
the most are neighbours, so any tree of prefixes is found: all share a system prompt, some of them a document behind it.
What is shared is whole splits, the pieces in which the kernels sum a row's keys anyway (attention_kernels.py): a
split's sums are the same whichever rows are computed beside it, and they are merged in their order either way.

Everything here is decided on the host, which has the tables, so the device is never asked.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.runner.backends.attention_work.dealing import SPLIT, Int32Array

_WORTH = 16
"""At least one walk of a split in this many must be saved.

The sums of splits go through memory then, which is 1/62 of the bytes of keys and values for heads of 64 in groups of 4
and bfloat16. Reckoned, not measured.
"""


def find_shared_splits(block_tables: Int32Array, seq_lens: Int32Array, block_size: int) -> Int32Array | None:
    """The order and the sharers of B sequences with block_tables [B, W]: [1 + S, B]; None if sharing does not pay.

    Row 0: all sequences, sharers beside each other. Row 1 + s: for each place in this order the first of the
    neighbouring places that have the same blocks up to the end of split s, and see all keys of that. Behind split S - 1
    nothing is shared.
    """
    seen = seq_lens // SPLIT
    candidates = np.flatnonzero(seen)
    if candidates.size:
        _, kinds, sizes = np.unique(block_tables[candidates, 0], return_inverse=True, return_counts=True)
        candidates = candidates[sizes[kinds] > 1]
    if candidates.size < 2:
        return None
    most = int(np.partition(seen[candidates], -2)[-2])
    leading = np.ascontiguousarray(block_tables[candidates, : -(-most * SPLIT // block_size)])
    # As bytes, whose order is not that of the numbers. All that counts is that equal beginnings are neighbours.
    order = np.argsort(leading.view(np.dtype((np.void, leading.itemsize * leading.shape[1])))[:, 0], kind="stable")
    leading, candidates = leading[order], candidates[order]
    differs = leading[1:] != leading[:-1]
    blocks = np.where(differs.any(axis=1), differs.argmax(axis=1), leading.shape[1])
    longest = np.minimum(seen[candidates[1:]], seen[candidates[:-1]])
    common = np.minimum(blocks * block_size // SPLIT, longest)
    if common.sum() * _WORTH < (-(-seq_lens // SPLIT)).sum() or not common.any():
        return None
    return _table(candidates, common, seq_lens.size)


def _table(candidates: npt.NDArray[np.intp], common: npt.NDArray[np.integer], size: int) -> Int32Array:
    """The result for sorted candidates of which each has so many leading splits in `common` with the one before it."""
    num_shared = int(common.max())
    table = unshared(num_shared, size)
    others = np.ones(size, dtype=bool)
    others[candidates] = False
    table[0] = np.concatenate([candidates, np.flatnonzero(others)])
    places = np.arange(1, candidates.size)
    is_first = common[None, :] <= np.arange(num_shared)[:, None]
    table[1:, 1 : candidates.size] = np.maximum.accumulate(np.where(is_first, places, 0), axis=1)
    return table


def unshared(num_splits: int, size: int) -> Int32Array:
    """The table of `size` sequences that share nothing of these splits: [1 + num_splits, size]."""
    return np.tile(np.arange(size, dtype=np.int32), (1 + num_splits, 1))


def find_in_groups(
    block_tables: Int32Array,
    seq_lens: Int32Array,
    query_start: Int32Array,
    block_size: int,
    windows: tuple[int | None, ...],
) -> list[Int32Array | None]:
    """The result of `find_shared_splits` for each group of layers, given block_tables [groups, B, W].

    None for all in a step in which a sequence has several queries, and for a group with a window: its tables may have
    lost the blocks behind it.
    """
    if seq_lens.size < 2 or (np.diff(query_start) > 1).any():
        return [None] * len(windows)
    return [
        find_shared_splits(tables, seq_lens, block_size) if window is None else None
        for tables, window in zip(block_tables, windows, strict=True)
    ]

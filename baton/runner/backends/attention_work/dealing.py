"""Deals a step's attention to programs of a GPU: which rows and which splits of keys each item has.

Rows of a sequence are computed in tiles of as many rows as fit them: 16 for a decode row, up to 128 for a prompt. The
keys of a tile are summed in splits of SPLIT keys (cuda/attention_kernels.py). An item has all splits of a tile, or
where the longest tile would keep others waiting, one split; the sums of such splits, the leaves, are merged in the
order of the splits. Rows that share leading blocks (cuda/shared_splits.py) are together in the items of the splits that
they share. Who computes what changes no bits.

All of it is decided on the host, which knows the lengths, so nothing is read from the device to start the kernels. A
step's work is dealt once for each kind of layer. Needs only numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

SPLIT = 512
"""Keys of a split, a multiple of every tile of keys."""
FIELDS: Final = 8
"""Numbers of an item: sequence, first row, number of rows, keys that the first row sees, first split, split to stop
before, first leaf, leaves of a row (0: the result is written). Together: of the first member, first member, number of
members, keys of all, splits. Of a merge: row, first leaf, leaf to stop before."""
LARGEST_TILE = 128
TOGETHER_ROWS = 64
"""The most rows of an item of rows that are together."""
_FEW_ROWS = 32
"""Leaves of so many rows are small beside the keys and values of a split: a sixteenth of them at heads of bfloat16."""
_PROGRAMS_TO_FILL = 264
"""How many programs keep a large GPU busy."""
_MOST_SUMS = 1 << 26
"""How many float32 numbers the sums of splits may take while they wait to be merged."""
LEAF_EXTRA: Final = 4
"""Numbers of a leaf behind its sums of values: the largest score, the sum of weights, and two that align it."""

_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WorkKind:
    """What of a layer decides how its work is dealt."""

    num_heads: int
    num_kv_heads: int
    value_dim: int
    window: int | None
    in_chunks: bool
    tiles: tuple[int, ...]
    """The rows that tiles may have, ascending, powers of two."""
    shares: bool

    def tile_heads(self, rows: int) -> int:
        """The heads of a group that a tile of `rows` rows has, a power of two."""
        group = self.num_heads // self.num_kv_heads
        return min(1 << (group - 1).bit_length(), rows)

    @property
    def together_rows(self) -> int:
        return max(rows for rows in self.tiles if rows <= TOGETHER_ROWS)

    def programs(self, rows: int) -> int:
        """The programs that an item of such tiles takes."""
        heads = self.tile_heads(rows)
        return self.num_kv_heads * -(-(self.num_heads // self.num_kv_heads) // heads)

    @property
    def most_leaves(self) -> int:
        return _MOST_SUMS // (self.num_heads * (self.value_dim + LEAF_EXTRA))


class Launch(NamedTuple):
    """What is started at once: items of tiles of `rows` rows. `divided`: of one split each."""

    rows: int
    divided: bool
    together: bool


class Dealt(NamedTuple):
    """The work of a step for one kind of layer."""

    launches: tuple[Launch, ...]
    items: tuple[Int32Array, ...]
    """For each launch [1 + N, FIELDS]; N is the first number."""
    members: Int32Array
    """[M, 2]: the row and the leaf of each member of the items of rows that are together."""
    merges: Int32Array
    """[1 + R, FIELDS]: the rows whose leaves are merged; R is the first number."""
    num_leaves: int


@dataclass(slots=True)
class _Leaves:
    """Numbers leaves, and collects the rows whose leaves are merged."""

    used: int
    merges: list[_Indices]


class _Tiles(NamedTuple):
    """Tiles of some rows; each an array."""

    sequence: _Indices
    row: _Indices
    num_rows: _Indices
    behind: _Indices
    """How many keys the first row sees."""
    first: _Indices
    stop: _Indices
    """The splits, before the last one."""


def deal(query_start: Int32Array, seq_lens: Int32Array, kind: WorkKind, sharing: Int32Array | None = None) -> Dealt:
    """Deal a step of sequences with the rows query_start [B + 1] and seq_lens [B] keys.

    `sharing`: what `find_shared_splits` found for a step in which no sequence has more than one row.
    """
    counts = np.diff(query_start).astype(np.int64)
    rows = counts * kind.tile_heads(LARGEST_TILE)
    leaves = _Leaves(0, [])
    launches: list[Launch] = []
    items: list[Int32Array] = []
    members = np.zeros((0, 2), np.int32)
    smaller = 0
    for tile in kind.tiles:
        fits = (rows > smaller) & ((rows <= tile) | (tile == kind.tiles[-1]))
        smaller = tile
        if not fits.any():
            continue
        tiles = _tiles(np.flatnonzero(fits), query_start, seq_lens, kind, tile)
        may_share = kind.shares and 2 * kind.tile_heads(kind.together_rows) <= kind.together_rows
        shared = sharing if may_share and _fit(tiles, kind) else None
        if shared is None and not _is_divided(tiles, kind, tile, leaves.used):
            order = np.argsort(tiles.first - tiles.stop, kind="stable")
            launches.append(Launch(tile, False, False))
            items.append(_table(*(each[order] for each in tiles), np.int64(0), np.int64(0)))
            continue
        first_leaf = _number(tiles, leaves)
        is_together = None
        if shared is not None:
            together, members, is_together = _together(tiles, first_leaf, shared, kind)
            launches.append(Launch(kind.together_rows, True, True))
            items.append(together)
        launches.append(Launch(tile, True, False))
        items.append(_splits(tiles, first_leaf, is_together))
    merges = np.concatenate([np.zeros((0, 3), np.int64), *leaves.merges])
    return Dealt(tuple(launches), tuple(items), members, _table(*merges.T, *[np.int64(0)] * 5), leaves.used)


def _tiles(sequences: _Indices, query_start: Int32Array, seq_lens: Int32Array, kind: WorkKind, rows: int) -> _Tiles:
    """The tiles of some sequences."""
    queries = rows // kind.tile_heads(rows)
    counts = query_start[sequences + 1].astype(np.int64) - query_start[sequences]
    numbers = -(-counts // queries)
    owner = np.repeat(np.arange(sequences.size), numbers)
    first = (np.arange(owner.size) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * queries
    count = np.minimum(queries, counts[owner] - first)
    behind = seq_lens[sequences][owner] - counts[owner] + 1 + first
    lowest = np.zeros_like(behind)
    if kind.window is not None:
        last = behind - 1
        lowest = last - last % kind.window if kind.in_chunks else np.maximum(behind - kind.window, 0)
    row = query_start[sequences][owner] + first
    return _Tiles(sequences[owner], row, count, behind, lowest // SPLIT, -(-(behind + count - 1) // SPLIT))


def _is_divided(tiles: _Tiles, kind: WorkKind, rows: int, num_leaves: int) -> bool:
    """Whether each split is an item of its own: where the longest tile takes long beside its share of all programs.

    A prompt's leaves are not small beside its keys, so it takes more to divide a prompt.
    """
    splits = tiles.stop - tiles.first
    share = splits.sum() * kind.programs(rows) / _PROGRAMS_TO_FILL
    longest = int(splits.max())
    few = int(tiles.num_rows.max()) * kind.num_heads // kind.num_kv_heads <= _FEW_ROWS
    is_long = longest > share / 2 if few else longest > share * 2
    return longest > 1 and is_long and _fit(tiles, kind, num_leaves)


def _fit(tiles: _Tiles, kind: WorkKind, num_leaves: int = 0) -> bool:
    """Whether there is memory for the leaves of these tiles."""
    return num_leaves + int((tiles.num_rows * (tiles.stop - tiles.first)).sum()) <= kind.most_leaves


def _number(tiles: _Tiles, leaves: _Leaves) -> _Indices:
    """The first leaf of each tile. A row's leaves are beside each other; a row with one split has none."""
    splits = tiles.stop - tiles.first
    needed = np.where(splits > 1, splits * tiles.num_rows, 0)
    first_leaf = leaves.used + np.cumsum(needed) - needed
    leaves.used += int(needed.sum())
    counts = np.where(splits > 1, tiles.num_rows, 0)
    owner = np.repeat(np.arange(counts.size), counts)
    own = np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)
    first = first_leaf[owner] + own * splits[owner]
    leaves.merges.append(np.stack([tiles.row[owner] + own, first, first + splits[owner]], axis=1))
    return first_leaf


def _splits(tiles: _Tiles, first_leaf: _Indices, is_together: npt.NDArray[np.bool_] | None) -> Int32Array:
    """An item for each split of each tile that is not in `is_together` [splits of all tiles]."""
    splits = tiles.stop - tiles.first
    owner = np.repeat(np.arange(splits.size), splits)
    own = np.arange(owner.size) - np.repeat(np.cumsum(splits) - splits, splits)
    if is_together is not None:
        owner, own = owner[~is_together], own[~is_together]
    split = tiles.first[owner] + own
    width = np.where(splits > 1, splits, 0)[owner]
    leaf = np.where(width > 0, first_leaf[owner] + own, 0)
    sequence, row, count, behind = (each[owner] for each in tiles[:4])
    return _table(sequence, row, count, behind, split, split + 1, leaf, width)


def _together(
    tiles: _Tiles, first_leaf: _Indices, sharing: Int32Array, kind: WorkKind
) -> tuple[Int32Array, Int32Array, npt.NDArray[np.bool_]]:
    """The items of rows that are together, their members, and which splits of all tiles these are.

    A split that is a row's only one has no leaf, and is walked by each row.
    """
    room = kind.together_rows // kind.tile_heads(kind.together_rows)
    splits = tiles.stop - tiles.first
    of_sequence = np.full(sharing.shape[1], -1)
    of_sequence[tiles.sequence] = np.where(splits > 1, np.arange(splits.size), -1)
    tile_at = of_sequence[sharing[0]]
    firsts = sharing[1:].astype(np.int64)
    split, place = np.nonzero((tile_at >= 0)[None, :] & np.ones_like(firsts, dtype=bool))
    group = split * sharing.shape[1] + firsts[split, place]
    # Places are ascending in each split, and a group's are neighbours, so each group is a run.
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    sizes = np.diff(begins, append=group.size)
    in_group = np.arange(group.size) - np.repeat(begins, sizes)
    left = np.repeat(sizes, sizes) - in_group // room * room
    chosen = left > 1
    split, place, in_group, left = split[chosen], place[chosen], in_group[chosen], left[chosen]
    tile = tile_at[place]
    members = np.stack([tiles.row[tile], first_leaf[tile] + split], axis=1).astype(np.int32)
    at = np.flatnonzero(in_group % room == 0)
    stop = (split[at] + 1) * SPLIT
    items = _table(
        tiles.sequence[tile[at]],
        at,
        np.minimum(left[at], room),
        stop,
        split[at],
        split[at] + 1,
        np.int64(0),
        np.int64(1),
    )
    is_together = np.zeros(int(splits.sum()), dtype=bool)
    is_together[(np.cumsum(splits) - splits)[tile] + split] = True
    return items, members, is_together


def _table(*columns: _Indices | np.int64) -> Int32Array:
    """Items, behind a first one that says how many there are."""
    table = np.zeros((1 + np.size(columns[0]), FIELDS), np.int32)
    for number, column in enumerate(columns):
        table[1:, number] = column
    table[0, 0] = table.shape[0] - 1
    return table

"""Attention on the paged cache as Triton kernels, which follow the block tables themselves.

A program computes a tile of ROWS rows: the query heads that share a KV head, times as many queries of one sequence as
fit. It walks over the keys in tiles of a fixed size. A row's bits depend on its own keys alone, never on the batch, the
chunk, or the places of the blocks:

- Tiles of keys, and the splits of SPLIT keys that they are summed in, begin at fixed positions of the sequence.
- Splits are computed by one program in turn or by several at once, and are merged in their order either way.
- Keys that only other rows of the tile see add nothing, exactly: their weights are zero. What is not finite is taken
  out of values that not all rows see, since zero times infinity is not zero.
- A product and a sum are never contracted into one rounding (enable_fp_fusion), which a compiler might do in one place
  and not in another.

A decode row fills few rows of a tile. Where the host finds sequences that share leading blocks (shared_splits.py), one
tile holds as many of their rows as fit for each split that they share, and the split is walked once for all of them.

Nothing is read from the device to start the kernels, so that CUDA graphs can record them. After FlashAttention-2
(https://arxiv.org/abs/2307.08691), and Flash-Decoding for the splits. Triton comes with torch's builds for CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from baton.runner.backends.attention_call import AttentionCall
from baton.runner.backends.cuda.shared_splits import SPLIT

ROWS = 16
"""Rows of a tile: the fewest that tensor cores multiply."""
_WARPS = 4
_PROGRAMS = 264
"""Below this number of programs, which keeps a large GPU busy, splits are computed by several programs at once."""
_MOST_PARTIAL_SUMS = 1 << 26
"""How many float32 numbers the sums of splits may take while they wait to be merged."""


def triton_attention(call: AttentionCall) -> torch.Tensor:
    """Compute a causal call without biases of distances: [T, H, VD]; rows of no sequence are zero."""
    query, cache, query_start, seq_lens = call.query, call.cache, call.query_start, call.seq_lens
    block_tables, sharing, window, softcap = call.block_tables, call.sharing, call.how.window, call.how.softcap
    scale, sinks = call.how.scale, call.how.sinks
    num_rows, num_heads, _ = query.shape
    num_sequences = seq_lens.shape[0]
    group = num_heads // cache.num_kv_heads
    tile_heads = min(triton.next_power_of_2(group), ROWS)
    parts = triton.cdiv(group, tile_heads)
    queries = ROWS // tile_heads
    splits = triton.cdiv(block_tables.shape[1] * cache.block_size, SPLIT)
    busy = max(num_rows // queries, num_sequences) * cache.num_kv_heads * parts
    width = cache.value_dim + 2
    fits = num_rows * num_heads * splits * width <= _MOST_PARTIAL_SUMS
    at_once = min(splits, triton.cdiv(_PROGRAMS, busy)) if fits else 1
    together = sharing is not None and fits and queries > 1 and not window
    in_turn = at_once == 1 and not together
    out = query.new_zeros(num_rows, num_heads, cache.value_dim)
    sums = out if in_turn else query.new_empty((num_rows, num_heads, splits, width), dtype=torch.float32)
    given_sinks = query if sinks is None else sinks
    to_finish: dict[str, Any] = {
        "HEADS": num_heads,
        "VALUE_DIM": cache.value_dim,
        "VALUE_WIDTH": _padded(cache.value_dim),
        "SPLIT_KEYS": SPLIT,
        "enable_fp_fusion": False,
    }
    in_chunks = call.how.in_chunks
    sees: dict[str, Any] = {"HAS_WINDOW": bool(window), "IN_CHUNKS": in_chunks, "HAS_SINKS": sinks is not None}
    tile_keys, stages = _tile_of_keys(query.dtype, max(cache.key_dim, cache.value_dim))
    to_walk: dict[str, Any] = {
        "GROUP": group,
        "TILE_HEADS": tile_heads,
        "TILE_ROWS": ROWS,
        "KEY_DIM": cache.key_dim,
        "KEY_WIDTH": _padded(cache.key_dim),
        "BLOCK_SIZE": cache.block_size,
        "KEYS": tile_keys,
        "HAS_SOFTCAP": bool(softcap),
        "num_warps": _WARPS,
        "num_stages": stages,
    }
    step = (query, cache.memory, query_start, seq_lens, block_tables)
    strides = (*query.stride()[:2], cache.key_offset, cache.value_offset, cache.block_stride, block_tables.stride(0))
    if together:
        assert sharing is not None
        num_shared = sharing.shape[0] - 1
        _attend_together[(num_sequences, cache.num_kv_heads, at_once)](
            *step, sharing, sums, *strides, splits, num_shared, scale, softcap or 0.0, **to_finish, **to_walk
        )
    else:
        # The tiles of sequence s begin at query_start[s] // queries + s, so these suffice for any batch of this size.
        tiles = num_rows // queries + num_sequences
        limits = (num_sequences, splits, scale, window or 0, softcap or 0.0)
        _attend[(tiles, cache.num_kv_heads * parts, at_once)](
            *step, given_sinks, out, sums, *strides, *limits, **to_finish, **to_walk, **sees, IN_TURN=in_turn
        )
    if not in_turn:
        given = (query_start, seq_lens, given_sinks, out, sums, num_sequences, splits, window or 0)
        _merge_splits[(num_rows, num_heads)](*given, **to_finish, **sees, num_warps=1)
    return out


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _tile_of_keys(dtype: torch.dtype, dim: int) -> tuple[int, int]:
    """How many keys a tile has, and how many tiles are loaded ahead, as shared memory allows."""
    if dim > 256:
        return 16, 1 if dtype == torch.float32 else 2
    if dtype == torch.float32:
        return 32, 1
    return (64, 2) if dim <= 128 else (32, 2)


@triton.jit
def _sequence_of(starts, count, place, QUERIES: tl.constexpr):
    """The sequence to which a tile of QUERIES queries belongs; or a row, if QUERIES is 0."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(starts + middle)
        if QUERIES > 0:
            first = first // QUERIES + middle
        low = tl.where(first <= place, middle, low)
        high = tl.where(first <= place, high, middle)
    return low


@triton.jit
def _first_key(stop, window, IN_CHUNKS: tl.constexpr):
    """The first key of the query that sees no keys from `stop` on."""
    if IN_CHUNKS:
        return stop - 1 - (stop - 1) % window
    return tl.maximum(stop - window, 0)


@triton.jit
def _merge(best, total, mixed, other_best, other_total, other_mixed):
    """Add the sums of the next split to those of all splits before it."""
    new_best = tl.maximum(best, other_best)
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    decay = tl.exp(best - shift)
    other_decay = tl.exp(other_best - shift)
    total = total * decay + other_total * other_decay
    mixed = mixed * decay[:, None] + other_mixed * other_decay[:, None]
    return new_best, total, mixed


@triton.jit
def _finish(best, total, mixed, sinks, heads, is_head, HAS_SINKS: tl.constexpr):
    """Divide by the sum of the weights; a sink has a weight, and no value."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
        shift = tl.maximum(best, sink)
        decay = tl.exp(best - shift)
        total = total * decay + tl.exp(sink - shift)
        mixed = mixed * decay[:, None]
    return mixed / total[:, None]


@triton.jit
def _walk(
    best,
    total,
    mixed,
    query,
    keys,
    values,
    table,
    block_stride,
    first,
    stop,
    lowest,
    highest,
    row_start,
    row_stop,
    scale,
    softcap,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ALL_SEE: tl.constexpr,
):
    """Add the tiles of keys from `first` to before `stop` to a split's sums.

    ALL_SEE: every row of the tile sees all their keys, as far as it sees any behind `lowest` and before `highest`.
    """
    key_dims = tl.arange(0, KEY_WIDTH)
    value_dims = tl.arange(0, VALUE_WIDTH)
    for at in range(first, stop, KEYS):
        key = at + tl.arange(0, KEYS)
        is_key = (key >= lowest) & (key < highest)
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64) * block_stride
        in_block = key % BLOCK_SIZE
        k = tl.load(
            keys + (block + in_block * KEY_DIM)[None, :] + key_dims[:, None],
            mask=is_key[None, :] & (key_dims < KEY_DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(query, k, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (
                1.0 - 2.0 / (tl.exp(2.0 * (scores / softcap)) + 1.0)
            )  # softcap * tanh(scores / softcap)
        sees = (key[None, :] >= row_start[:, None]) & (key[None, :] < row_stop[:, None])
        scores = tl.where(sees, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(best - shift)
        v = tl.load(
            values + (block + in_block * VALUE_DIM)[:, None] + value_dims[None, :],
            mask=is_key[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        total = total * decay + tl.sum(weights, 1)
        mixed = mixed * decay[:, None]
        if not ALL_SEE:
            is_bad = tl.max(tl.where(tl.abs(v.to(tl.float32)) < float("inf"), 0, 1), 1) > 0
            v = tl.where(is_bad[:, None], 0.0, v.to(tl.float32)).to(v.dtype)
            sees_bad = tl.max(tl.where(sees & is_bad[None, :], 1, 0), 1) > 0
            mixed = tl.where(sees_bad[:, None], float("nan"), mixed)
        mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision="ieee")
        best = new_best
    return best, total, mixed


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "num_splits", "window"])
def _attend(
    query,
    memory,
    query_start,
    seq_lens,
    block_tables,
    sinks,
    out,
    sums,
    row_stride,
    head_stride,
    key_offset,
    value_offset,
    block_stride,
    table_stride,
    num_sequences,
    num_splits,
    scale,
    window,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IN_TURN: tl.constexpr,
):
    """Programs: tiles of queries x KV heads x splits at once.

    With IN_TURN a program computes all splits and the result, otherwise the sums of its share of the splits, which
    `_merge_splits` merges.
    """
    QUERIES: tl.constexpr = TILE_ROWS // TILE_HEADS
    PARTS: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    # The last queries see most keys: their programs come first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    sequence = _sequence_of(query_start, num_sequences, tile, QUERIES)
    first_row = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - first_row
    first_query = (tile - (first_row // QUERIES + sequence)) * QUERIES
    if first_query >= count:
        return
    last_query = tl.minimum(first_query + QUERIES, count) - 1
    # Key positions: query q of a sequence sees keys from row_start to before row_stop.
    behind = tl.load(seq_lens + sequence) - count + 1
    rows = tl.arange(0, TILE_ROWS)
    own_query = first_query + rows // TILE_HEADS
    head_in_group = tl.program_id(1) % PARTS * TILE_HEADS + rows % TILE_HEADS
    is_row = (own_query <= last_query) & (head_in_group < GROUP)
    heads = kv_head * GROUP + head_in_group
    row_stop = behind + tl.minimum(own_query, last_query)
    row_start = row_stop * 0
    lowest = 0
    all_from = 0
    if HAS_WINDOW:
        row_start = _first_key(row_stop, window, IN_CHUNKS)
        lowest = _first_key(behind + first_query, window, IN_CHUNKS)
        all_from = (_first_key(behind + last_query, window, IN_CHUNKS) + KEYS - 1) // KEYS * KEYS
    highest = behind + last_query
    # All rows see the keys of tiles from `all_from` to before `all_to`.
    all_to = highest + KEYS
    if first_query < last_query:
        all_to = (behind + first_query) // KEYS * KEYS
    all_to = tl.maximum(all_to, all_from)

    places = (first_row + own_query).to(tl.int64)
    dims = tl.arange(0, KEY_WIDTH)
    q = tl.load(
        query + (places * row_stride + heads * head_stride)[:, None] + dims[None, :],
        mask=is_row[:, None] & (dims < KEY_DIM)[None, :],
        other=0.0,
    )
    keys = memory + key_offset + kv_head * (BLOCK_SIZE * KEY_DIM)
    values = memory + value_offset + kv_head * (BLOCK_SIZE * VALUE_DIM)
    table = block_tables + sequence.to(tl.int64) * table_stride
    value_dims = tl.arange(0, VALUE_WIDTH)
    is_value = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]

    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    mixed = tl.zeros([TILE_ROWS, VALUE_WIDTH], tl.float32)
    step = 1 if IN_TURN else tl.num_programs(2)
    for split in range(lowest // SPLIT_KEYS + tl.program_id(2), (highest + SPLIT_KEYS - 1) // SPLIT_KEYS, step):
        first = tl.maximum(split * SPLIT_KEYS, lowest // KEYS * KEYS)
        stop = tl.minimum((split + 1) * SPLIT_KEYS, highest)
        b = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        t = tl.zeros([TILE_ROWS], tl.float32)
        m = tl.zeros([TILE_ROWS, VALUE_WIDTH], tl.float32)
        if HAS_WINDOW:
            b, t, m = _walk(
                b, t, m, q, keys, values, table, block_stride, first, tl.minimum(stop, all_from), lowest, highest,
                row_start, row_stop, scale, softcap, KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, KEYS,
                HAS_SOFTCAP, False,
            )  # fmt: skip
            first = tl.maximum(first, all_from)
        b, t, m = _walk(
            b, t, m, q, keys, values, table, block_stride, first, tl.minimum(stop, all_to), lowest, highest,
            row_start, row_stop, scale, softcap, KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, KEYS,
            HAS_SOFTCAP, True,
        )  # fmt: skip
        b, t, m = _walk(
            b, t, m, q, keys, values, table, block_stride, tl.maximum(first, all_to), stop, lowest, highest,
            row_start, row_stop, scale, softcap, KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, KEYS,
            HAS_SOFTCAP, False,
        )  # fmt: skip
        if IN_TURN:
            best, total, mixed = _merge(best, total, mixed, b, t, m)
        else:
            own = sums + ((places * HEADS + heads) * num_splits + split) * (VALUE_DIM + 2)
            tl.store(own[:, None] + value_dims[None, :], m, mask=is_value)
            tl.store(own + VALUE_DIM, b, mask=is_row)
            tl.store(own + VALUE_DIM + 1, t, mask=is_row)
    if IN_TURN:
        result = _finish(best, total, mixed, sinks, heads, is_row, HAS_SINKS)
        own = out + (places * HEADS + heads) * VALUE_DIM
        tl.store(own[:, None] + value_dims[None, :], result.to(out.dtype.element_ty), mask=is_value)


@triton.jit(do_not_specialize=["table_stride", "num_splits", "num_shared"])
def _attend_together(
    query,
    memory,
    query_start,
    seq_lens,
    block_tables,
    sharing,
    sums,
    row_stride,
    head_stride,
    key_offset,
    value_offset,
    block_stride,
    table_stride,
    num_splits,
    num_shared,
    scale,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Programs: sequences, in the order of `sharing` (shared_splits.py), x KV heads x splits at once.

    For sequences of one query or none. Writes the sums of all splits, which `_merge_splits` merges. Sharers take turns:
    each walks some of the splits that they share, for as many of them as a tile has room for.
    """
    SHARERS: tl.constexpr = TILE_ROWS // TILE_HEADS
    count = tl.num_programs(0)
    place = tl.program_id(0)
    kv_head = tl.program_id(1)
    own = tl.load(sharing + place).to(tl.int64)
    highest = tl.load(seq_lens + own)
    rows = tl.arange(0, TILE_ROWS)
    heads = kv_head * GROUP + rows % TILE_HEADS
    is_head = rows % TILE_HEADS < GROUP
    dims = tl.arange(0, KEY_WIDTH)
    value_dims = tl.arange(0, VALUE_WIDTH)
    keys = memory + key_offset + kv_head * (BLOCK_SIZE * KEY_DIM)
    values = memory + value_offset + kv_head * (BLOCK_SIZE * VALUE_DIM)
    table = block_tables + own * table_stride
    step = tl.num_programs(2)
    for split in range(tl.program_id(2), (highest + SPLIT_KEYS - 1) // SPLIT_KEYS, step):
        firsts = sharing + (1 + split) * count
        stop_place = tl.where(split < num_shared, count, 0)
        first_place = tl.load(firsts + place, mask=place < stop_place, other=place)
        tile_place = place - (place - first_place) % SHARERS
        places = tile_place + rows // TILE_HEADS
        others = tl.load(firsts + places, mask=places < stop_place, other=-1)
        is_sharer = (others == first_place) | (places == place)
        sharers = tl.sum(is_sharer.to(tl.int32), 0) // TILE_HEADS
        if split // step % sharers == place - tile_place:
            sequences = tl.load(sharing + places, mask=is_sharer, other=0)
            row = tl.load(query_start + sequences, mask=is_sharer, other=0)
            stop_row = tl.load(query_start + sequences + 1, mask=is_sharer, other=0)
            is_row = (row < stop_row) & is_head
            row = row.to(tl.int64)
            q = tl.load(
                query + (row * row_stride + heads * head_stride)[:, None] + dims[None, :],
                mask=is_row[:, None] & (dims < KEY_DIM)[None, :],
                other=0.0,
            )
            stop = tl.minimum((split + 1) * SPLIT_KEYS, highest)
            b = tl.full([TILE_ROWS], float("-inf"), tl.float32)
            t = tl.zeros([TILE_ROWS], tl.float32)
            m = tl.zeros([TILE_ROWS, VALUE_WIDTH], tl.float32)
            b, t, m = _walk(
                b, t, m, q, keys, values, table, block_stride, split * SPLIT_KEYS, stop, 0, stop, rows * 0,
                rows * 0 + stop, scale, softcap, KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, KEYS,
                HAS_SOFTCAP, True,
            )  # fmt: skip
            to = sums + ((row * HEADS + heads) * num_splits + split) * (VALUE_DIM + 2)
            tl.store(to[:, None] + value_dims[None, :], m, mask=is_row[:, None] & (value_dims < VALUE_DIM)[None, :])
            tl.store(to + VALUE_DIM, b, mask=is_row)
            tl.store(to + VALUE_DIM + 1, t, mask=is_row)


@triton.jit(do_not_specialize=["num_sequences", "num_splits", "window"])
def _merge_splits(
    query_start,
    seq_lens,
    sinks,
    out,
    sums,
    num_sequences,
    num_splits,
    window,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Programs: rows x heads. Merges the splits of which a row sees keys."""
    row = tl.program_id(0)
    sequence = _sequence_of(query_start, num_sequences, row, 0)
    stop_row = tl.load(query_start + sequence + 1)
    if row >= stop_row:
        return
    highest = tl.load(seq_lens + sequence) - (stop_row - 1 - row)
    lowest = 0
    if HAS_WINDOW:
        lowest = _first_key(highest, window, IN_CHUNKS)
    one = tl.arange(0, 1)
    head = tl.program_id(1) + one
    place = row.to(tl.int64) * HEADS + head
    dims = tl.arange(0, VALUE_WIDTH)
    is_value = (dims < VALUE_DIM)[None, :]
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, VALUE_WIDTH], tl.float32)
    for split in range(lowest // SPLIT_KEYS, (highest + SPLIT_KEYS - 1) // SPLIT_KEYS):
        own = sums + (place * num_splits + split) * (VALUE_DIM + 2)
        m = tl.load(own[:, None] + dims[None, :], mask=is_value, other=0.0)
        b = tl.load(own + VALUE_DIM)
        t = tl.load(own + VALUE_DIM + 1)
        best, total, mixed = _merge(best, total, mixed, b, t, m)
    result = _finish(best, total, mixed, sinks, head, one == 0, HAS_SINKS)
    tl.store((out + place * VALUE_DIM)[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=is_value)

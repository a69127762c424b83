"""The Triton kernels of attention on the paged cache: the walk over keys, and the merge of splits.

What they are given to compute is dealt on the host (attention_work/dealing.py); triton_attention.py starts them.

A tile is ROWS rows: the query heads that share a KV head, times as many queries of one sequence as fit. It walks over
the keys in tiles of KEYS keys and sums them in splits of SPLIT_KEYS keys, which both begin at fixed positions of the
sequence; the sums of splits are merged in their order. A row's bits depend on its own keys alone, whatever ROWS is, and
whoever computes which splits:

- A dot is one chain over its terms in their order, for every number of rows (`AttentionChoice` checks that). The sum of
  the weights is a dot, too, with ones: a reduction over a row would depend on how the row lies in registers.
- The largest score of a row is exact in any order.
- Merging with splits of which a row sees no key changes nothing: their weights are exactly zero.
- Keys that only other rows of the tile see add nothing, exactly: their weights are zero. What is not finite is taken
  out of values that not all rows see, since zero times infinity is not zero.
- Products and sums are contracted into one rounding only where `fma` says so (enable_fp_fusion).

After FlashAttention-2 (https://arxiv.org/abs/2307.08691), and Flash-Decoding for the splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.runner.backends.attention_work import dealing

FIELDS = tl.constexpr(dealing.FIELDS)
LEAF_EXTRA = tl.constexpr(dealing.LEAF_EXTRA)


@triton.jit
def _first_key(stop, window, IN_CHUNKS: tl.constexpr):
    """The first key of the query that sees no keys from `stop` on."""
    if IN_CHUNKS:
        return stop - 1 - (stop - 1) % window
    return tl.maximum(stop - window, 0)


@triton.jit
def _merge(best, total, mixed, other_best, other_total, other_mixed):
    """Add the sums of the next split to those of all splits before it. Totals are [rows, any number of equal ones]."""
    new_best = tl.maximum(best, other_best)
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    decay = tl.exp2(best - shift)
    other_decay = tl.exp2(other_best - shift)
    total = total * decay[:, None] + other_total * other_decay[:, None]
    mixed = mixed * decay[:, None] + other_mixed * other_decay[:, None]
    return new_best, total, mixed


@triton.jit
def _finish(best, total, mixed, sinks, heads, is_head, HAS_SINKS: tl.constexpr):
    """Divide by the sum of the weights [rows]; a sink has a weight, and no value."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634
        shift = tl.maximum(best, sink)
        decay = tl.exp2(best - shift)
        total = total * decay + tl.exp2(sink - shift)
        mixed = mixed * decay[:, None]
    # A zero is positive, as it is where it was merged into nothing.
    return (mixed + 0.0) / total[:, None]


@triton.jit
def _wide(codes, FORMAT: tl.constexpr):
    """The float32 numbers of 8-bit codes: int8, or float8 (e4m3fn), which not all GPUs convert."""
    numbers = codes.to(tl.float32)
    if FORMAT == "float8":
        bits = codes.to(tl.int32) & 0xFF
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
        # The exponent of a half has a bias of 15 in place of 7.
        numbers = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    return numbers


@triton.jit
def _read(
    at,
    offset,
    scales,
    dims,
    is_key,
    dtype: tl.constexpr,
    FORMAT: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys or values of a tile [KEYS, WIDTH], whose rows begin at `at` + `offset`; `scales` [KEYS]: of codes."""
    places = at + offset[:, None] + dims[None, :]
    if MASKED:
        numbers = tl.load(places, mask=is_key[:, None] & (dims < DIM)[None, :], other=0)
    elif WIDTH != DIM:
        numbers = tl.load(places, mask=(dims < DIM)[None, :], other=0)
    else:
        numbers = tl.load(places)
    if FORMAT is not None:
        scale = tl.load(scales, mask=is_key, other=0.0) if MASKED else tl.load(scales)
        numbers = (_wide(numbers, FORMAT) * scale.to(tl.float32)[:, None]).to(dtype)
    return numbers


@triton.jit
def _add_tile(
    best,
    total,
    mixed,
    q,
    q_rest,
    keys,
    values,
    scales,
    table,
    block_stride,
    at,
    lowest,
    highest,
    row_start,
    row_stop,
    unit,
    cap,
    to_cap,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALES_APART: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the tile of keys at `at` to a split's sums. Without MASKED every row sees all of its keys."""
    key = at + tl.arange(0, KEYS)
    is_key = (key >= lowest) & (key < highest)
    if BLOCK_SIZE % KEYS == 0:
        block = tl.load(table + at // BLOCK_SIZE).to(tl.int64) * block_stride + tl.zeros([KEYS], tl.int64)
    elif MASKED:
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64) * block_stride
    else:
        block = tl.load(table + key // BLOCK_SIZE).to(tl.int64) * block_stride
    in_block = key % BLOCK_SIZE
    of_key = scales
    if FORMAT is not None:
        of_key = scales + block // 2 + in_block
    of_value = of_key + SCALES_APART
    to_key, to_value = block + in_block * KEY_DIM, block + in_block * VALUE_DIM
    dims = tl.arange(0, KEY_WIDTH)
    if REST_WIDTH > 0:
        k = _read(keys, to_key, of_key, dims, is_key, q.dtype, FORMAT, KEY_WIDTH, KEY_WIDTH, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        dims = tl.arange(0, REST_WIDTH)
        REST_DIM: tl.constexpr = KEY_DIM - KEY_WIDTH
        k = _read(keys + KEY_WIDTH, to_key, of_key, dims, is_key, q.dtype, FORMAT, REST_DIM, REST_WIDTH, MASKED)
        scores = tl.dot(q_rest, tl.trans(k), scores, input_precision="ieee")
    else:
        k = _read(keys, to_key, of_key, dims, is_key, q.dtype, FORMAT, KEY_DIM, KEY_WIDTH, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        SLICE: tl.constexpr = 32 if VALUE_WIDTH % 32 == 0 else 16
        # Read in slices, which take few registers. Values that are not finite are left out, and spoil who sees them.
        dims = tl.arange(0, SLICE)
        worst = tl.zeros([KEYS], tl.int32)
        for skip in tl.static_range(0, VALUE_WIDTH, SLICE):
            piece = _read(
                values + skip, to_value, of_value, dims, is_key, q.dtype, FORMAT, VALUE_DIM - skip, SLICE, True
            )
            worst = tl.maximum(worst, tl.max(tl.where(tl.abs(piece.to(tl.float32)) < float("inf"), 0, 1), 1))
        is_bad = worst > 0
        is_key = is_key & (worst == 0)
    dims = tl.arange(0, VALUE_WIDTH)
    v = _read(values, to_value, of_value, dims, is_key, q.dtype, FORMAT, VALUE_DIM, VALUE_WIDTH, MASKED)
    if HAS_SOFTCAP:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * to_cap) + 1.0))  # cap * tanh(score * scale / cap)
    if MASKED:
        sees = (key[None, :] >= row_start[:, None]) & (key[None, :] < row_stop[:, None])
        scores = tl.where(sees, tl.where(is_bad[None, :], float("nan"), scores), float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1) * unit)
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(tl.fma(scores, unit, -shift[:, None])).to(v.dtype)
    decay = tl.exp2(best - shift)
    mixed = mixed * decay[:, None]
    ones = tl.full([KEYS, 8], 1.0, tl.float32).to(v.dtype)
    total = tl.dot(weights, ones, total * decay[:, None], input_precision="ieee")
    mixed = tl.dot(weights, v, mixed, input_precision="ieee")
    return new_best, total, mixed


@triton.jit
def _begin(ROWS: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """The sums of no keys."""
    best = tl.full([ROWS], float("-inf"), tl.float32)
    return best, tl.zeros([ROWS, 8], tl.float32), tl.zeros([ROWS, VALUE_WIDTH], tl.float32)


@triton.jit(do_not_specialize=["table_stride", "window"])
def attend(
    query,
    memory,
    block_tables,
    dealt,
    members,
    scales,
    sinks,
    out,
    sums,
    row_stride,
    head_stride,
    key_offset,
    value_offset,
    block_stride,
    table_stride,
    unit,
    cap,
    to_cap,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALES_APART: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DIVIDED: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Programs: any number of them; each takes every so manieth of the items times KV heads.

    An item is some splits of some rows. If these are all of the rows' splits, the result is written; otherwise the sums
    of each split, which `merge` merges. With TOGETHER the rows are `members`, of sequences that share the split.
    """
    PARTS: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    EACH: tl.constexpr = HEADS // GROUP * PARTS
    rows = tl.arange(0, ROWS)
    value_dims = tl.arange(0, VALUE_WIDTH)
    key_dims = tl.arange(0, KEY_WIDTH)
    num_items = tl.load(dealt)
    for task in range(tl.program_id(0), num_items * EACH, tl.num_programs(0)):
        item = dealt + (1 + task // EACH) * FIELDS
        kv_head = task % EACH // PARTS
        sequence = tl.load(item)
        first_row = tl.load(item + 1)
        count = tl.load(item + 2)
        behind = tl.load(item + 3)
        first = tl.load(item + 4) * SPLIT_KEYS
        leaf = tl.load(item + 6)
        width = tl.load(item + 7)
        # Key positions: the row `own` of the item sees keys from row_start to before row_stop.
        own = rows // TILE_HEADS
        head_in_group = task % PARTS * TILE_HEADS + rows % TILE_HEADS
        is_row = (own < count) & (head_in_group < GROUP)
        heads = kv_head * GROUP + head_in_group
        highest = behind + count - 1
        row_stop = behind + tl.minimum(own, count - 1)
        place = (first_row + own).to(tl.int64)
        slot = leaf + own * width
        if TOGETHER:
            place = tl.load(members + first_row * 2 + own * 2, mask=is_row, other=0).to(tl.int64)
            slot = tl.load(members + first_row * 2 + own * 2 + 1, mask=is_row, other=0)
            highest = behind
            row_stop = behind + rows * 0
        row_start = rows * 0
        lowest = 0
        all_from = 0
        if HAS_WINDOW:
            row_start = _first_key(row_stop, window, IN_CHUNKS)
            lowest = _first_key(behind, window, IN_CHUNKS)
            all_from = (_first_key(highest, window, IN_CHUNKS) + KEYS - 1) // KEYS * KEYS
            first = tl.maximum(first, lowest // KEYS * KEYS)
        stop = tl.minimum(tl.load(item + 5) * SPLIT_KEYS, highest)
        # All rows see all keys of the tiles from `all_from` to before `all_to`.
        all_to = tl.maximum(tl.minimum(behind // KEYS * KEYS, stop // KEYS * KEYS), first)

        to_query = query + (place * row_stride + heads * head_stride)[:, None]
        q_rest = 0.0
        if REST_WIDTH > 0:
            q = tl.load(to_query + key_dims[None, :], mask=is_row[:, None], other=0.0)
            rest_dims = KEY_WIDTH + tl.arange(0, REST_WIDTH)
            q_rest = tl.load(
                to_query + rest_dims[None, :], mask=is_row[:, None] & (rest_dims < KEY_DIM)[None, :], other=0.0
            )
        else:
            q = tl.load(to_query + key_dims[None, :], mask=is_row[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0)
        keys = memory + key_offset + kv_head * (BLOCK_SIZE * KEY_DIM)
        values = memory + value_offset + kv_head * (BLOCK_SIZE * VALUE_DIM)
        key_scales = scales + kv_head * BLOCK_SIZE
        table = block_tables + sequence.to(tl.int64) * table_stride

        best, total, mixed = _begin(ROWS, VALUE_WIDTH)
        b, t, m = _begin(ROWS, VALUE_WIDTH)
        for part in tl.static_range(3):
            # 0: tiles before those that all rows see, of a window; 1: these; 2: tiles behind them.
            start = first
            end = stop
            if HAS_WINDOW:
                if part == 0:
                    end = tl.minimum(stop, all_from)
                else:
                    start = tl.maximum(first, all_from)
            if part == 1:
                end = all_to
            if part == 2:
                start = tl.maximum(start, all_to)
            if (part == 1) | (part == 0 and HAS_WINDOW) | (part == 2 and not TOGETHER):
                for at in range(start, end, KEYS):
                    b, t, m = _add_tile(
                        b, t, m, q, q_rest, keys, values, key_scales, table, block_stride, at, lowest, highest,
                        row_start, row_stop, unit, cap, to_cap, KEY_DIM, VALUE_DIM, KEY_WIDTH, REST_WIDTH, VALUE_WIDTH,
                        BLOCK_SIZE, KEYS, FORMAT, SCALES_APART, HAS_SOFTCAP, part != 1,
                    )  # fmt: skip
                    if not DIVIDED:  # noqa: SIM102 - decided when it is compiled
                        if ((at + KEYS) % SPLIT_KEYS == 0) | (at + KEYS >= stop):
                            best, total, mixed = _merge(best, total, mixed, b, t, m)
                            b, t, m = _begin(ROWS, VALUE_WIDTH)
        is_value = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
        if DIVIDED:
            best, total, mixed = b, t, m
        if DIVIDED and width > 0:
            to_leaf = sums + (slot.to(tl.int64) * HEADS + heads) * (VALUE_DIM + LEAF_EXTRA)
            tl.store(to_leaf[:, None] + value_dims[None, :], mixed, mask=is_value)
            tl.store(to_leaf + VALUE_DIM, best, mask=is_row)
            tl.store(to_leaf + VALUE_DIM + 1, tl.max(total, 1), mask=is_row)
        else:
            result = _finish(best, tl.max(total, 1), mixed, sinks, heads, is_row, HAS_SINKS)
            to = out + (place * HEADS + heads) * VALUE_DIM
            tl.store(to[:, None] + value_dims[None, :], result.to(out.dtype.element_ty), mask=is_value)


@triton.jit
def merge(
    dealt,
    sinks,
    out,
    sums,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Programs: any number of them; each takes every so manieth of the rows that were divided times heads."""
    one = tl.arange(0, 1)
    dims = tl.arange(0, VALUE_WIDTH)
    is_value = (dims < VALUE_DIM)[None, :]
    num_rows = tl.load(dealt)
    for task in range(tl.program_id(0), num_rows * HEADS, tl.num_programs(0)):
        item = dealt + (1 + task // HEADS) * FIELDS
        head = task % HEADS + one
        first = tl.load(item + 1)
        stop = tl.load(item + 2)
        best = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1, 1], tl.float32)
        mixed = tl.zeros([1, VALUE_WIDTH], tl.float32)
        for batch in range(first, stop, AT_ONCE):
            for each in tl.static_range(AT_ONCE):
                slot = batch + each
                leaf = sums + (slot.to(tl.int64) * HEADS + head) * (VALUE_DIM + LEAF_EXTRA)
                is_leaf = (slot < stop) & (one == 0)
                m = tl.load(leaf[:, None] + dims[None, :], mask=is_value & is_leaf[:, None], other=0.0)
                b = tl.load(leaf + VALUE_DIM, mask=is_leaf, other=float("-inf"))
                t = tl.load(leaf + VALUE_DIM + 1, mask=is_leaf, other=0.0)
                best, total, mixed = _merge(best, total, mixed, b, t[:, None], m)
        result = _finish(best, tl.max(total, 1), mixed, sinks, head, one == 0, HAS_SINKS)
        to = out + (tl.load(item).to(tl.int64) * HEADS + head) * VALUE_DIM
        tl.store(to[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=is_value)

"""Queries, keys and values between their product and attention as one Triton kernel: norms, rotation, and the cache.

A program has one row and a few of its heads. It computes what `Operations.rms_norm`, `rotate` and `store_kv` do, with a
rounding to the dtype of the rows after each, and no product and sum are contracted into one rounding. A row's bits
depend on the row alone: the heads of a program follow from the model, and the squares of a head are added in one order
for its width.

Nothing is read from the device to start the kernel, so that CUDA graphs can record it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.runner.backends.head_rows import HeadNorm, HeadRows
from baton.runner.backends.paged_cache import CacheView

_NUMBERS = 1024
"""How many numbers of heads a program has, at most: 8 for each thread."""
_WARPS = 4


def triton_heads(rows: HeadRows, cos: torch.Tensor, sin: torch.Tensor, cache: CacheView, slots: torch.Tensor) -> None:
    """Norm and rotate queries in place, and norm, rotate and store keys, and store values; see `HeadRows`."""
    _start(rows.queries_and_keys, rows.num_queries, rows.value, cos, sin, rows.in_pairs, rows.norms, cache, slots)


def triton_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_pairs: bool) -> None:
    """Compute `Operations.rotate`; the last dimension of x [T, H, D] is dense."""
    _start(x, x.shape[1], None, cos, sin, in_pairs, None, None, None)


def triton_store(key: torch.Tensor, value: torch.Tensor | None, cache: CacheView, slots: torch.Tensor) -> None:
    """Compute `Operations.store_kv` for a cache in the dtype of the rows; their last dimensions are dense."""
    no_angles = key.new_empty(key.shape[0], 0)
    _start(key, 0, value, no_angles, no_angles, False, None, cache, slots)


def _start(
    x: torch.Tensor,
    num_queries: int,
    value: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    in_pairs: bool,
    norms: tuple[HeadNorm, HeadNorm] | None,
    cache: CacheView | None,
    slots: torch.Tensor | None,
) -> None:
    count, num_heads, dim = x.shape
    if not x.numel():
        return
    num_angles = cos.shape[1] // 2
    half = triton.next_power_of_2(max(num_angles, 1))
    rest = dim - 2 * num_angles
    heads = max(1, _NUMBERS // triton.next_power_of_2(dim))
    num_values, value_dim = (0, 1) if value is None else value.shape[1:]
    value_heads = max(1, _NUMBERS // triton.next_power_of_2(value_dim))
    tiles = triton.cdiv(num_heads, heads)
    query_norm, key_norm = norms or (None, None)
    _heads[(count, tiles + triton.cdiv(num_values, value_heads))](
        x,
        x if value is None else value,
        cos,
        sin,
        x if query_norm is None else query_norm.weight,
        x if key_norm is None else key_norm.weight,
        x if cache is None else cache.memory,
        x if slots is None else slots,
        num_queries,
        num_heads,
        num_values,
        tiles,
        x.stride(0),
        x.stride(1),
        0 if value is None else value.stride(0),
        0 if value is None else value.stride(1),
        cos.stride(0),
        sin.stride(0),
        0 if query_norm is None else query_norm.eps,
        0 if key_norm is None else key_norm.eps,
        0 if cache is None else cache.key_offset,
        0 if cache is None else cache.value_offset,
        0 if cache is None else cache.block_stride,
        BLOCK_SIZE=1 if cache is None else cache.block_size,
        DIM=dim,
        ANGLES=num_angles,
        HALF=half,
        REST=rest,
        REST_WIDTH=triton.next_power_of_2(max(rest, 1)),
        HEADS=heads,
        VALUE_DIM=value_dim,
        VALUE_WIDTH=triton.next_power_of_2(value_dim),
        VALUE_HEADS=value_heads,
        IN_PAIRS=in_pairs,
        HAS_NORMS=norms is not None,
        PLUS_ONE=query_norm is not None and query_norm.plus_one,
        STORES=cache is not None,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )


@triton.jit(
    do_not_specialize=[
        "cos",
        "sin",
        "slots",
        "num_queries",
        "num_heads",
        "num_values",
        "tiles",
        "key_offset",
        "value_offset",
        "block_stride",
    ]
)
def _heads(
    x,
    value,
    cos,
    sin,
    query_weight,
    key_weight,
    memory,
    slots,
    num_queries,
    num_heads,
    num_values,
    tiles,
    row_stride,
    head_stride,
    value_row_stride,
    value_head_stride,
    cos_stride,
    sin_stride,
    query_eps,
    key_eps,
    key_offset,
    value_offset,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    ANGLES: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    STORES: tl.constexpr,
):
    """Heads of queries and keys of one row, or of its values. Keys and values without a slot are not stored."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    to_block = memory
    is_stored = False
    if STORES:
        slot = tl.load(slots + row).to(tl.int64)
        is_stored = slot >= 0
        to_block = memory + slot // BLOCK_SIZE * block_stride
        in_block = slot % BLOCK_SIZE
    if tile < tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)
        is_head = heads < num_heads
        is_key = heads >= num_queries
        own = x + row * row_stride + heads[:, None] * head_stride
        # Queries are written where they were, keys to the cache.
        target = own
        is_written = is_head
        if STORES:
            to_key = to_block + key_offset + ((heads - num_queries) * BLOCK_SIZE + in_block)[:, None] * DIM
            target = tl.where(is_key[:, None], to_key, own)
            is_written = is_head & (is_stored | (heads < num_queries))
        rest = tl.arange(0, REST_WIDTH)
        is_rest = is_head[:, None] & (rest < REST)[None, :]
        others = tl.load(own + 2 * ANGLES + rest[None, :], mask=is_rest, other=0.0)
        if ANGLES > 0:
            angles = tl.arange(0, HALF)
            first = 2 * angles if IN_PAIRS else angles
            second = first + (1 if IN_PAIRS else ANGLES)
            is_angle = angles < ANGLES
            is_own = is_head[:, None] & is_angle[None, :]
            one = tl.load(own + first[None, :], mask=is_own, other=0.0)
            other = tl.load(own + second[None, :], mask=is_own, other=0.0)
        if HAS_NORMS:
            weight = tl.where(is_key[:, None], key_weight, query_weight)
            squares = tl.sum(others.to(tl.float32) * others.to(tl.float32), axis=1)
            if ANGLES > 0:
                squares += tl.sum(one.to(tl.float32) * one.to(tl.float32), axis=1)
                squares += tl.sum(other.to(tl.float32) * other.to(tl.float32), axis=1)
            root = tl.rsqrt(squares / DIM + tl.where(is_key, key_eps, query_eps))
            others = _normed(others, root, weight + 2 * ANGLES + rest[None, :], (rest < REST)[None, :], PLUS_ONE)
            if ANGLES > 0:
                one = _normed(one, root, weight + first[None, :], is_angle[None, :], PLUS_ONE)
                other = _normed(other, root, weight + second[None, :], is_angle[None, :], PLUS_ONE)
        # Threads may load the same numbers: the last one has to, before the first one writes.
        tl.debug_barrier()
        if ANGLES > 0:
            own_cos = tl.load(cos + row * cos_stride + angles, mask=is_angle, other=0.0).to(tl.float32)[None, :]
            own_sin = tl.load(sin + row * sin_stride + angles, mask=is_angle, other=0.0).to(tl.float32)[None, :]
            left, right = one.to(tl.float32), other.to(tl.float32)
            is_target = is_written[:, None] & is_angle[None, :]
            turned = (left * own_cos - right * own_sin).to(x.dtype.element_ty)
            tl.store(target + first[None, :], turned, mask=is_target)
            turned = (right * own_cos + left * own_sin).to(x.dtype.element_ty)
            tl.store(target + second[None, :], turned, mask=is_target)
        if HAS_NORMS or STORES:
            tl.store(target + 2 * ANGLES + rest[None, :], others, mask=is_written[:, None] & (rest < REST)[None, :])
    elif STORES:
        places = (tile - tiles) * VALUE_HEADS + tl.arange(0, VALUE_HEADS)
        dims = tl.arange(0, VALUE_WIDTH)
        is_value = (is_stored & (places < num_values))[:, None] & (dims < VALUE_DIM)[None, :]
        from_value = value + row * value_row_stride + places[:, None] * value_head_stride + dims[None, :]
        to_value = to_block + value_offset + (places * BLOCK_SIZE + in_block)[:, None] * VALUE_DIM + dims[None, :]
        tl.store(to_value, tl.load(from_value, mask=is_value, other=0.0), mask=is_value)


@triton.jit
def _normed(x, root, weight, is_own, PLUS_ONE: tl.constexpr):
    """x [HEADS, W] times the root [HEADS] and the weight at these places, rounded as `Operations.rms_norm` does."""
    factor = tl.load(weight, mask=is_own, other=0.0).to(tl.float32)
    normal = x.to(tl.float32) * root[:, None]
    result = normal * (1.0 + factor) if PLUS_ONE else normal.to(x.dtype).to(tl.float32) * factor
    return result.to(x.dtype)

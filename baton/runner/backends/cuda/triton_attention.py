"""Attention on the paged cache by Triton's kernels (attention_kernels.py), which follow the block tables themselves.

What each program computes is dealt on the host (attention_work/dealing.py), and nothing is read from the device to
start the kernels, so that CUDA graphs can record them. Triton comes with torch's builds for CUDA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from baton.runner.backends.attention_call import AttentionCall
from baton.runner.backends.attention_work.dealing import LEAF_EXTRA, SPLIT, WorkKind
from baton.runner.backends.attention_work.step_work import StepWork
from baton.runner.backends.cuda import attention_kernels

_FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "float8"}
_LOG2_E = 1.4426950408889634
_MOST_KEPT_PROGRAMS = 528
"""The programs of a launch whose number of items is on the device."""
_LEAVES_AT_ONCE = 8
"""How many leaves are read before they are merged."""


class _Tile(NamedTuple):
    """How tiles of some rows are computed."""

    rows: int
    warps: int
    registers: int = 255
    """The most of a thread. Left alone, ptxas takes fewer, and spills."""


def triton_attention(call: AttentionCall) -> torch.Tensor:
    """Compute a causal call without biases of distances: [T, H, VD]; rows of no sequence are zero.

    Raises ValueError for a scale that is not positive.
    """
    query, cache, how = call.query, call.cache, call.how
    if how.scale <= 0:
        raise ValueError(f"scores are multiplied by {how.scale}, and must be by a positive number")
    num_rows, num_heads, _ = query.shape
    group = num_heads // cache.num_kv_heads
    work = call.work or StepWork.read(call.query_start, call.seq_lens)
    dim = max(cache.key_dim, cache.value_dim)
    every_tile = _tiles(query.dtype, dim, has_window=how.window is not None, has_codes=cache.scale_offset is not None)
    tiles = {tile.rows: tile for tile in every_tile if tile.rows <= call.most_rows}
    kind = WorkKind(
        num_heads,
        cache.num_kv_heads,
        cache.value_dim,
        how.window,
        how.in_chunks,
        tuple(tiles),
        call.shares and how.window is None,
    )
    dealt = work.on_device(kind)
    out = (query.new_empty if work.num_rows == num_rows else query.new_zeros)(num_rows, num_heads, cache.value_dim)
    sums = out
    if dealt.most_leaves:
        leaves = dealt.most_leaves * num_heads * (cache.value_dim + LEAF_EXTRA)
        sums = query.new_empty(leaves, dtype=torch.float32)
    unit, cap, to_cap = how.scale * _LOG2_E, 0.0, 0.0
    if how.softcap:
        unit, cap, to_cap = _LOG2_E, how.softcap, 2 * _LOG2_E * how.scale / how.softcap
    sinks = query if how.sinks is None else how.sinks
    to_finish: dict[str, Any] = {
        "HEADS": num_heads,
        "VALUE_DIM": cache.value_dim,
        "VALUE_WIDTH": _padded(cache.value_dim),
        "HAS_SINKS": how.sinks is not None,
        "enable_fp_fusion": False,
    }
    memory = scales = cache.memory
    if cache.scale_offset is not None:
        memory, scales = memory.view(torch.int8), memory.view(torch.bfloat16)[cache.scale_offset // 2 :]
    key_width, rest_width = _key_widths(cache.key_dim)
    to_walk: dict[str, Any] = {
        "GROUP": group,
        "KEY_DIM": cache.key_dim,
        "KEY_WIDTH": key_width,
        "REST_WIDTH": rest_width,
        "BLOCK_SIZE": cache.block_size,
        "KEYS": _keys(query.dtype, dim),
        "SPLIT_KEYS": SPLIT,
        "FORMAT": _FORMATS.get(cache.memory.dtype),
        "SCALES_APART": cache.scales_apart if cache.scale_offset is not None else 0,
        "HAS_WINDOW": how.window is not None,
        "IN_CHUNKS": how.in_chunks,
        "HAS_SOFTCAP": bool(how.softcap),
        "num_stages": _stages(query.dtype, cache.memory.dtype),
    }
    strides = (
        *query.stride()[:2],
        cache.key_offset,
        cache.value_offset,
        cache.block_stride,
        call.block_tables.stride(0),
    )
    for launch, items, most_items in zip(dealt.launches, dealt.items, dealt.num_items, strict=True):
        tile = tiles[launch.rows]
        programs = most_items * kind.programs(launch.rows)
        if dealt.is_kept:
            programs = min(programs, _MOST_KEPT_PROGRAMS)
        if not programs:
            continue
        attention_kernels.attend[(programs,)](
            query, memory, call.block_tables, items, dealt.members, scales, sinks, out, sums, *strides, unit, cap,
            to_cap, how.window or 0, **to_finish, **to_walk, TILE_HEADS=kind.tile_heads(launch.rows), ROWS=launch.rows,
            DIVIDED=launch.divided, TOGETHER=launch.together, num_warps=tile.warps,
            maxnreg=tile.registers,
        )  # fmt: skip
    if dealt.most_merges:
        programs = dealt.most_merges * num_heads
        attention_kernels.merge[(programs,)](
            dealt.merges, sinks, out, sums, **to_finish, AT_ONCE=_LEAVES_AT_ONCE, num_warps=1
        )
    return out


def _tiles(dtype: torch.dtype, dim: int, *, has_window: bool, has_codes: bool) -> tuple[_Tile, ...]:
    """The tiles that registers and shared memory have room for: fewer rows before capability 9, where operands of
    products are in registers, too, and where a window takes one more loop or codes are widened."""
    if dtype == torch.float32 or dim > 256:
        return (_Tile(16, 4),)
    capability = _capability()
    if has_codes:
        few = _Tile(16, 8 if capability >= 90 or 64 < dim <= 128 else 4)
        if capability >= 100 and dim > 128:
            return (few,)
        return few, _Tile(64, 8) if capability >= 90 and dim <= 128 else _Tile(32, 8 if dim > 64 else 4)
    if dim > 128:
        return _Tile(16, 4), _Tile(32, 8)
    is_tight = capability >= 100 and has_window and dim > 64
    smallest = _Tile(16, 8 if is_tight else 4, 255 if has_window or capability >= 100 else 168)
    if capability < 90:
        return smallest, _Tile(64, 8) if dim > 64 else _Tile(32, 4)
    if has_window and dim > 64:
        return smallest, _Tile(64, 8)
    return smallest, _Tile(64, 8 if capability >= 100 and dim > 64 else 4), _Tile(128, 8)


def _stages(dtype: torch.dtype, of_cache: torch.dtype) -> int:
    """How many tiles of keys are loaded ahead, as registers and shared memory allow."""
    has_wide_codes = of_cache == torch.float8_e4m3fn and _capability() >= 100
    return 1 if dtype == torch.float32 or has_wide_codes else 2


def _capability() -> int:
    """The compute capability that kernels are compiled for, times ten; 90 in the interpreter."""
    try:
        return int(triton.runtime.driver.active.get_current_target().arch)
    except RuntimeError:  # there is no driver
        return 90


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _key_widths(dim: int) -> tuple[int, int]:
    """A power of two, and the padded width of what is left of a key."""
    if dim <= 16 or dim & (dim - 1) == 0:
        return _padded(dim), 0
    width = 1 << (dim.bit_length() - 1)
    return width, _padded(dim - width)


def _keys(dtype: torch.dtype, dim: int) -> int:
    """How many keys a tile has, as shared memory allows. It decides bits, so it is the same for all numbers of rows."""
    if dim > 256:
        return 16
    if dtype == torch.float32:
        return 32
    return 64 if dim <= 128 else 32

"""Attention on the paged KV cache, and the function that stores keys and values in the cache."""

from __future__ import annotations

import ctypes
import math

import torch

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.cpu.kernels.call_structs import (
    CacheFormat,
    KernelAttentionCall,
    KernelSelectionCall,
    StoreCall,
)
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.library import CACHE_FORMATS, DTYPES, check_status, library
from baton.runner.backends.key_selection import WORD_BITS, SelectionCall
from baton.runner.backends.paged_cache import CacheView

MAX_HEAD_DIM = 704
MOST_SELECTING_HEADS = 128
BFLOAT16_BYTES = 2
SCALE_BYTES = 2 * BFLOAT16_BYTES
"""The bytes of the scales of one key and one value in 8 bits."""


def paged_attention(call: AttentionCall, *, threads: int) -> torch.Tensor:
    """Attention of query [rows, heads, key_dim] on the paged cache: [rows, heads, value_dim].

    The query is float32 or bfloat16, with gaps between its rows allowed; the cache is of the same dtype, or in 8 bits.
    There may be gaps between the rows of the block tables, too. A row's bits depend on its query and its own keys and
    values alone. Raises KernelArgumentError for tensors that don't fit, and for heads whose width is above MAX_HEAD_DIM
    or no multiple of 8.
    """
    query, cache = call.query, call.cache
    if query.ndim != 3 or query.dtype not in row_dtypes(cache) or not query.is_cpu:
        dtypes = " or ".join(map(str, row_dtypes(cache)))
        raise KernelArgumentError("query", f"must be [rows, heads, {cache.key_dim}] {dtypes} on the CPU")
    rows, heads, key_dim = query.shape
    query_stride, head_stride, last_stride = query.stride()
    if (last_stride != 1 and key_dim > 1) or (head_stride != key_dim and heads > 1):
        raise KernelArgumentError("query", "has rows that are not contiguous")
    require_cache(cache)
    require_key_dim(cache, key_dim)
    table_stride = require_requests(call.query_start, call.seq_lens, call.block_tables)
    sinks = require_features(call.how, heads, cache)
    require_distance_bias(call.how, heads, query.device)
    out = query.new_empty((rows, heads, cache.value_dim))
    structure = attention_structure(call.how, heads, cache, sinks, key_dim)
    if call.selected is not None:
        _require_selected(call, rows)
        structure.selected, structure.selected_words = call.selected.data_ptr(), call.selected.shape[1]
    structure.query, structure.out = query.data_ptr(), out.data_ptr()
    structure.query_start, structure.seq_lens = call.query_start.data_ptr(), call.seq_lens.data_ptr()
    structure.block_tables = call.block_tables.data_ptr()
    structure.rows, structure.query_stride, structure.out_stride = rows, query_stride, heads * cache.value_dim
    structure.num_seqs, structure.table_width = call.block_tables.shape
    structure.table_stride = table_stride
    lib = library()
    status = lib.attention(lib.isa, DTYPES[query.dtype], ctypes.byref(structure), threads)
    if status:
        check_status(status)
    return out


def attention_structure(
    how: AttentionFeatures, heads: int, cache: CacheView, sinks: torch.Tensor | None, key_dim: int | None = None
) -> KernelAttentionCall:
    """The kernel's arguments for a layer, without those of a step. `sinks`: those that `require_features` returned.

    `key_dim`: how many numbers of a key give its scores; None: all.
    """
    bias = how.distance_bias
    return KernelAttentionCall(
        cache=cache.memory.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        distance_bias=None if bias is None else bias.data_ptr(),
        block_stride=cache.block_stride,
        key_offset=cache.key_offset,
        value_offset=cache.value_offset,
        scale_offset=cache.scale_offset or 0,
        scales_apart=cache.scales_apart,
        values_in_keys=int(cache.values_in_keys),
        num_blocks=cache.num_blocks,
        heads=heads,
        kv_heads=cache.num_kv_heads,
        key_dim=cache.key_dim if key_dim is None else key_dim,
        key_stride=cache.key_dim,
        value_dim=cache.value_dim,
        block_size=cache.block_size,
        window=how.window or 0,
        ahead=how.ahead,
        in_chunks=int(how.in_chunks),
        num_distances=0 if bias is None else bias.shape[1],
        scale=how.scale,
        softcap=how.softcap or 0.0,
        format=cache_format(cache),
    )


def select_keys(call: SelectionCall, *, threads: int) -> torch.Tensor:
    """The keys that each row attends to: int64 [rows, words]. A row's bits depend on itself and its sequence alone.

    Raises KernelArgumentError for tensors that don't fit, and for more than MOST_SELECTING_HEADS heads.
    """
    query, cache, weights = call.query, call.cache, call.weights
    if query.ndim != 3 or query.dtype not in row_dtypes(cache) or not query.is_cpu or not query.is_contiguous():
        raise KernelArgumentError("query", "must be [rows, heads, d], contiguous, on the CPU, in a dtype of the cache")
    rows, heads, width = query.shape
    require_cache(cache)
    structure = selection_structure(cache, heads, width, call.first, call.scale, call.most)
    if weights.shape != (rows, heads) or weights.dtype != torch.float32 or not weights.is_contiguous():
        raise KernelArgumentError("weights", f"must be float32 [{rows}, {heads}], contiguous")
    if not weights.is_cpu:
        raise KernelArgumentError("weights", "must be on the CPU")
    table_stride = require_requests(call.query_start, call.seq_lens, call.block_tables)
    selected = torch.zeros(rows, call.num_words, dtype=torch.int64)
    keys = structure.keys
    keys.query, keys.query_start, keys.seq_lens = (
        query.data_ptr(),
        call.query_start.data_ptr(),
        call.seq_lens.data_ptr(),
    )
    keys.block_tables, keys.table_stride = call.block_tables.data_ptr(), table_stride
    keys.rows = rows
    keys.num_seqs, keys.table_width = call.block_tables.shape
    structure.weights, structure.selected, structure.words = weights.data_ptr(), selected.data_ptr(), call.num_words
    lib = library()
    status = lib.select_keys(lib.isa, DTYPES[query.dtype], ctypes.byref(structure), threads)
    if status:
        check_status(status)
    return selected


def selection_structure(
    cache: CacheView, heads: int, width: int, first: int, scale: float, most: int
) -> KernelSelectionCall:
    """The kernel's arguments for a layer and contiguous queries [rows, heads, width], without those of a step.

    `first`, `scale`, `most`: as in SelectionCall. Raises KernelArgumentError for those that don't fit.
    """
    if cache.num_kv_heads != 1 or not cache.values_in_keys or not 1 <= heads <= MOST_SELECTING_HEADS:
        raise KernelArgumentError("query", f"must have 1 to {MOST_SELECTING_HEADS} heads, and the cache one")
    if width % 8 or first % 8 or not 0 <= first <= cache.key_dim - width or width < 1:
        raise KernelArgumentError("first", f"is {first}: {width} numbers from there are not in keys")
    if most < 1 or not math.isfinite(scale):
        raise KernelArgumentError("most", f"and scale must be at least 1 and finite, are {most} and {scale}")
    keys = attention_structure(AttentionFeatures(scale), heads, cache, None, width)
    keys.key_offset = keys.value_offset = cache.key_offset + first
    keys.value_dim, keys.query_stride = width, heads * width
    return KernelSelectionCall(keys, weights_stride=heads, most=most)


def require_key_dim(cache: CacheView, key_dim: int) -> None:
    """Raises KernelArgumentError for query heads that are neither as wide as keys nor as narrow as they may be."""
    is_narrower = cache.values_in_keys and cache.value_dim <= key_dim < cache.key_dim and key_dim % 8 == 0
    if key_dim != cache.key_dim and not is_narrower:
        raise KernelArgumentError("query", f"has heads of {key_dim}, the cache of {cache.key_dim}")


def require_selecting(how: AttentionFeatures) -> None:
    """Raises KernelArgumentError for features that attention to selected keys can't compute."""
    if how.softcap is not None or how.sinks is not None or how.distance_bias is not None or how.scale <= 0:
        raise KernelArgumentError("selected", "can't be given with a soft cap, sinks, biases or a scale of 0 or below")


def _require_selected(call: AttentionCall, rows: int) -> None:
    """Raises KernelArgumentError for a selection that doesn't fit."""
    selected = call.selected
    assert selected is not None
    if selected.ndim != 2 or selected.shape[0] != rows or selected.dtype != torch.int64 or not selected.is_contiguous():
        raise KernelArgumentError("selected", f"must be int64 [{rows}, words], contiguous")
    if not selected.is_cpu:
        raise KernelArgumentError("selected", "must be on the CPU")
    if call.seq_lens.numel() and int(call.seq_lens.max()) > selected.shape[1] * WORD_BITS:
        raise KernelArgumentError("selected", f"has {selected.shape[1]} words, too few for the longest sequence")
    require_selecting(call.how)


def store_kv(
    key: torch.Tensor, value: torch.Tensor | None, cache: CacheView, slots: torch.Tensor, *, threads: int = 1
) -> None:
    """Write key [rows, kv_heads, key_dim] and value [rows, kv_heads, value_dim] into the cache, on one thread.

    `value`: None for a cache whose values are in its keys. Row t is written to slot slots[t] (int64 [rows]) = block *
    block_size + offset; rows with a negative slot are padding and are skipped. There may be gaps between rows. Raises
    KernelArgumentError, and writes nothing, for tensors that don't fit.
    """
    require_cache(cache)
    key_stride = _require_rows("key", key, cache, cache.key_dim)
    if (value is None) != cache.values_in_keys:
        raise KernelArgumentError("value", "must be given, unless values are in keys")
    value_stride = 0 if value is None else _require_rows("value", value, cache, cache.value_dim)
    rows = key.shape[0]
    if value is not None and (value.shape[0] != rows or value.dtype != key.dtype):
        raise KernelArgumentError("value", f"has {value.shape[0]} rows of {value.dtype}, the key {rows} of {key.dtype}")
    if slots.shape != (rows,) or slots.dtype != torch.int64 or not slots.is_cpu or not slots.is_contiguous():
        raise KernelArgumentError("slots", f"must be int64 [{rows}], contiguous, on the CPU")
    call = store_call(cache, key.dtype, key_stride, value_stride)
    call.key, call.value = key.data_ptr(), None if value is None else value.data_ptr()
    call.slots, call.tokens = slots.data_ptr(), rows
    status = library().store_kv(ctypes.byref(call))
    if status:
        check_status(status)


def store_call(cache: CacheView, dtype: torch.dtype, key_stride: int, value_stride: int) -> StoreCall:
    """A call that stores rows of `dtype`, without their addresses and number. Strides count elements of the rows."""
    size = cache.memory.element_size()
    return StoreCall(
        cache=cache.memory.data_ptr(),
        kv_heads=cache.num_kv_heads,
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        key_size=cache.key_dim * size,
        value_size=0 if cache.values_in_keys else cache.value_dim * size,
        key_stride=key_stride * dtype.itemsize,
        value_stride=value_stride * dtype.itemsize,
        block_stride=cache.block_stride * size,
        key_offset=cache.key_offset * size,
        value_offset=cache.value_offset * size,
        scale_offset=cache.scale_offset or 0,
        scales_apart=cache.scales_apart,
        format=cache_format(cache),
        dtype=DTYPES[dtype],
    )


def cache_format(cache: CacheView) -> CacheFormat:
    """How keys and values are stored in this cache."""
    return CACHE_FORMATS.get(cache.memory.dtype, CacheFormat.AS_IT_IS)


def _require_rows(name: str, rows: torch.Tensor, cache: CacheView, dim: int) -> int:
    """The stride of rows [rows, kv_heads, dim], in elements; raises KernelArgumentError for rows that don't fit."""
    if rows.ndim != 3 or rows.shape[1] != cache.num_kv_heads or rows.shape[2] != dim:
        raise KernelArgumentError(name, f"must be [rows, {cache.num_kv_heads}, {dim}], is {tuple(rows.shape)}")
    if rows.dtype not in row_dtypes(cache) or not rows.is_cpu:
        dtypes = " or ".join(map(str, row_dtypes(cache)))
        raise KernelArgumentError(name, f"must be {dtypes} on the CPU, is {rows.dtype}")
    stride, head_stride, last_stride = rows.stride()
    if (last_stride != 1 and dim > 1) or (head_stride != dim and cache.num_kv_heads > 1):
        raise KernelArgumentError(name, "has rows that are not contiguous")
    return stride


def require_features(how: AttentionFeatures, heads: int, cache: CacheView) -> torch.Tensor | None:
    """The sinks in float32; raises KernelArgumentError for features that `paged_attention` can't compute.

    Biases of distances are checked by `require_distance_bias`.
    """
    if heads == 0 or heads % cache.num_kv_heads != 0:
        raise KernelArgumentError("query", f"{heads} heads can't share {cache.num_kv_heads} key/value heads evenly")
    if not math.isfinite(how.scale):
        raise KernelArgumentError("scale", f"must be finite, is {how.scale}")
    if how.window is not None and how.window < 1:
        raise KernelArgumentError("window", f"must be at least 1, is {how.window}")
    if how.in_chunks and how.window is None:
        raise KernelArgumentError("in_chunks", "needs a window, the size of a chunk")
    if how.softcap is not None and not (math.isfinite(how.softcap) and how.softcap > 0):
        raise KernelArgumentError("softcap", f"must be positive, is {how.softcap}")
    sinks = how.sinks
    if sinks is None:
        return None
    if sinks.shape != (heads,) or not sinks.is_cpu:
        raise KernelArgumentError("sinks", f"must be [{heads}] on the CPU, is {tuple(sinks.shape)}")
    return sinks.detach().to(torch.float32).contiguous()


def require_distance_bias(how: AttentionFeatures, heads: int, device: torch.device) -> None:
    """Raises KernelArgumentError for biases that don't fit queries with so many heads, on any device.

    They are refused with a soft cap or with keys behind, too.
    """
    bias = how.distance_bias
    if bias is None:
        return
    if bias.ndim != 2 or bias.shape[0] != heads or bias.shape[1] < 1:
        raise KernelArgumentError("distance_bias", f"must be [{heads}, at least 1], is {tuple(bias.shape)}")
    if bias.dtype != torch.float32 or bias.device != device:
        actual = f"{bias.dtype} on {bias.device}"
        raise KernelArgumentError("distance_bias", f"must be torch.float32 on {device}, is {actual}")
    if not bias.is_contiguous():
        raise KernelArgumentError("distance_bias", "is not contiguous")
    if how.softcap is not None or how.ahead:
        raise KernelArgumentError("distance_bias", "can't be given with a soft cap or with keys behind")


def row_dtypes(cache: CacheView) -> tuple[torch.dtype, ...]:
    """The dtypes that queries, keys and values of this cache may have."""
    return tuple(DTYPES) if cache.memory.dtype in CACHE_FORMATS else (cache.memory.dtype,)


def require_cache(cache: CacheView) -> None:
    """Raises KernelArgumentError for a cache that the kernels can't read."""
    memory = cache.memory
    known = (*DTYPES, *CACHE_FORMATS)
    if memory.ndim != 1 or memory.dtype not in known or not memory.is_cpu or not memory.is_contiguous():
        raise KernelArgumentError("cache", f"memory must be one dimension of {', '.join(map(str, known))}, on the CPU")
    if (cache.scale_offset is None) != (memory.dtype not in CACHE_FORMATS):
        raise KernelArgumentError("cache", "has scales in 8 bits, and only then")
    if min(cache.num_kv_heads, cache.block_size) < 1 or cache.num_blocks < 0:
        raise KernelArgumentError("cache", "has an empty dimension")
    for name, dim in (("key_dim", cache.key_dim), ("value_dim", cache.value_dim)):
        if dim % 8 != 0 or not 8 <= dim <= MAX_HEAD_DIM:
            raise KernelArgumentError(name, f"must be a multiple of 8 from 8 to {MAX_HEAD_DIM}, is {dim}")
    if cache.values_in_keys and cache.value_dim > cache.key_dim:
        raise KernelArgumentError("value_dim", f"is {cache.value_dim}, and values are in keys of {cache.key_dim}")
    parts = [("keys", cache.key_offset, cache.key_dim)]
    if not cache.values_in_keys:
        parts.append(("values", cache.value_offset, cache.value_dim))
    if cache.scale_offset is not None:
        behind = cache.scale_offset + cache.scales_apart * BFLOAT16_BYTES
        parts += [("scales", offset, BFLOAT16_BYTES) for offset in (cache.scale_offset, behind)]
        if (cache.scale_offset | cache.block_stride | memory.data_ptr()) % BFLOAT16_BYTES != 0:
            raise KernelArgumentError("cache", "has scales at odd addresses")
    for name, offset, width in parts:
        end = offset + cache.num_kv_heads * cache.block_size * width
        if offset < 0 or end > cache.block_stride:
            raise KernelArgumentError("cache", f"a block's {name} reach beyond it")
        if cache.num_blocks > 0 and (cache.num_blocks - 1) * cache.block_stride + end > memory.shape[0]:
            raise KernelArgumentError(
                "cache", f"memory of {memory.shape[0]} is too small for {cache.num_blocks} blocks"
            )


def require_requests(query_start: torch.Tensor, seq_lens: torch.Tensor, block_tables: torch.Tensor) -> int:
    """The stride of the block tables' rows, in elements; raises KernelArgumentError for tensors that don't fit."""
    for name, tensor in (("query_start", query_start), ("seq_lens", seq_lens)):
        if tensor.dtype != torch.int32 or tensor.ndim != 1 or not tensor.is_cpu or not tensor.is_contiguous():
            raise KernelArgumentError(name, "must be int32 of one dimension, contiguous, on the CPU")
    seqs = seq_lens.shape[0]
    if query_start.shape[0] != seqs + 1:
        raise KernelArgumentError("query_start", "must have one element more than seq_lens")
    if block_tables.ndim != 2 or block_tables.shape[0] != seqs:
        raise KernelArgumentError("block_tables", "must have one row for each of seq_lens")
    stride, last_stride = block_tables.stride()
    if block_tables.dtype != torch.int32 or not block_tables.is_cpu or (last_stride != 1 and block_tables.shape[1] > 1):
        raise KernelArgumentError("block_tables", "must be int32 with contiguous rows on the CPU")
    return stride

"""Attention on the paged KV cache, and the function that stores keys and values in the cache."""

from __future__ import annotations

import ctypes
import math

import torch

from baton.runner.backends.cpu.kernels.cache import CacheView
from baton.runner.backends.cpu.kernels.call_structs import AttentionCall, CacheFormat, StoreCall
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.library import CACHE_FORMATS, DTYPES, check_status, library

MAX_HEAD_DIM = 256
BFLOAT16_BYTES = 2
SCALE_BYTES = 2 * BFLOAT16_BYTES
"""The bytes of the scales of one key and one value in 8 bits."""


def paged_attention(
    query: torch.Tensor,
    cache: CacheView,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    ahead: int = 0,
    distance_bias: torch.Tensor | None = None,
    threads: int,
) -> torch.Tensor:
    """Attention of query [rows, heads, key_dim] on the paged cache: [rows, heads, value_dim].

    `query`: float32 or bfloat16, with gaps between its rows allowed. `cache`: of the same dtype, or in 8 bits.
    `query_start` (int32 [seqs + 1]): request s has the query rows query_start[s] to query_start[s + 1], or none.
    `seq_lens` (int32 [seqs]): the request's number of tokens; its query rows are the last of them.
    `block_tables` (int32 [seqs, width], with gaps between rows allowed): the blocks with its keys and values.
    `window`: position i attends to the positions above i - window.
    `ahead`: position i attends to the positions up to i + ahead, as far as its request has them; 0: causal attention.
    `softcap`: scores become softcap * tanh(score / softcap).
    `sinks` ([heads], float32 or the query's dtype): one more score for each head, which has no value.
    `distance_bias` (float32 [heads, distances], contiguous): what is added to scaled scores, by the distance of a key.

    Rows behind the last request's are zero. A row's bits depend on its query and its own keys and values alone. Raises
    KernelArgumentError for tensors that don't fit, and for heads whose width is above 256 or no multiple of 8.
    """
    if query.ndim != 3 or query.dtype not in row_dtypes(cache) or not query.is_cpu:
        dtypes = " or ".join(map(str, row_dtypes(cache)))
        raise KernelArgumentError("query", f"must be [rows, heads, {cache.key_dim}] {dtypes} on the CPU")
    rows, heads, key_dim = query.shape
    query_stride, head_stride, one = query.stride()
    if (one != 1 and key_dim > 1) or (head_stride != key_dim and heads > 1):
        raise KernelArgumentError("query", "has rows that are not contiguous")
    require_cache(cache)
    if key_dim != cache.key_dim:
        raise KernelArgumentError("query", f"has heads of {key_dim}, the cache of {cache.key_dim}")
    table_stride = require_requests(query_start, seq_lens, block_tables)
    sinks = require_attention(heads, cache, scale, window, softcap, sinks)
    require_distance_bias(distance_bias, query, softcap, ahead)
    out = query.new_empty((rows, heads, cache.value_dim))
    call = AttentionCall(
        query.data_ptr(),
        out.data_ptr(),
        cache.memory.data_ptr(),
        query_start.data_ptr(),
        seq_lens.data_ptr(),
        block_tables.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        None if distance_bias is None else distance_bias.data_ptr(),
        cache.block_stride,
        cache.key_offset,
        cache.value_offset,
        cache.scale_offset or 0,
        cache.scales_apart,
        rows,
        query_stride,
        heads * cache.value_dim,
        seq_lens.shape[0],
        block_tables.shape[1],
        table_stride,
        cache.num_blocks,
        heads,
        cache.num_kv_heads,
        key_dim,
        cache.value_dim,
        cache.block_size,
        window or 0,
        ahead,
        0 if distance_bias is None else distance_bias.shape[1],
        scale,
        softcap or 0.0,
        cache_format(cache),
    )
    lib = library()
    status = lib.attention(lib.isa, DTYPES[query.dtype], ctypes.byref(call), threads)
    if status:
        check_status(status)
    return out


def store_kv(
    key: torch.Tensor, value: torch.Tensor, cache: CacheView, slots: torch.Tensor, *, threads: int = 1
) -> None:
    """Write key [rows, kv_heads, key_dim] and value [rows, kv_heads, value_dim] into the cache, on one thread.

    Row t is written to slot slots[t] (int64 [rows]) = block * block_size + offset; rows with a negative slot are
    padding and are skipped. There may be gaps between rows. Raises KernelArgumentError, and writes nothing, for tensors
    that don't fit.
    """
    require_cache(cache)
    key_stride = _require_rows("key", key, cache, cache.key_dim)
    value_stride = _require_rows("value", value, cache, cache.value_dim)
    rows = key.shape[0]
    if value.shape[0] != rows or value.dtype != key.dtype:
        raise KernelArgumentError("value", f"has {value.shape[0]} rows of {value.dtype}, the key {rows} of {key.dtype}")
    if slots.shape != (rows,) or slots.dtype != torch.int64 or not slots.is_cpu or not slots.is_contiguous():
        raise KernelArgumentError("slots", f"must be int64 [{rows}], contiguous, on the CPU")
    call = store_call(cache, key.dtype, key_stride, value_stride)
    call.key, call.value, call.slots, call.tokens = key.data_ptr(), value.data_ptr(), slots.data_ptr(), rows
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
        value_size=cache.value_dim * size,
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
    stride, head_stride, one = rows.stride()
    if (one != 1 and dim > 1) or (head_stride != dim and cache.num_kv_heads > 1):
        raise KernelArgumentError(name, "has rows that are not contiguous")
    return stride


def require_attention(
    heads: int,
    cache: CacheView,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor | None:
    """The sinks in float32; raises KernelArgumentError for parameters that `paged_attention` can't take."""
    if heads == 0 or heads % cache.num_kv_heads != 0:
        raise KernelArgumentError("query", f"{heads} heads can't share {cache.num_kv_heads} key/value heads evenly")
    if not math.isfinite(scale):
        raise KernelArgumentError("scale", f"must be finite, is {scale}")
    if window is not None and window < 1:
        raise KernelArgumentError("window", f"must be at least 1, is {window}")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise KernelArgumentError("softcap", f"must be positive, is {softcap}")
    if sinks is None:
        return None
    if sinks.shape != (heads,) or not sinks.is_cpu:
        raise KernelArgumentError("sinks", f"must be [{heads}] on the CPU, is {tuple(sinks.shape)}")
    return sinks.detach().to(torch.float32).contiguous()


def require_distance_bias(
    distance_bias: torch.Tensor | None, query: torch.Tensor, softcap: float | None, ahead: int
) -> None:
    """Raises KernelArgumentError for biases that don't fit the query [rows, heads, key_dim], on any device.

    They are refused with a soft cap or with keys behind, too.
    """
    if distance_bias is None:
        return
    heads = query.shape[1]
    if distance_bias.ndim != 2 or distance_bias.shape[0] != heads or distance_bias.shape[1] < 1:
        raise KernelArgumentError("distance_bias", f"must be [{heads}, at least 1], is {tuple(distance_bias.shape)}")
    if distance_bias.dtype != torch.float32 or distance_bias.device != query.device:
        found = f"{distance_bias.dtype} on {distance_bias.device}"
        raise KernelArgumentError("distance_bias", f"must be torch.float32 on {query.device}, is {found}")
    if not distance_bias.is_contiguous():
        raise KernelArgumentError("distance_bias", "is not contiguous")
    if softcap is not None or ahead:
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
    parts = [("keys", cache.key_offset, cache.key_dim), ("values", cache.value_offset, cache.value_dim)]
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
    stride, one = block_tables.stride()
    if block_tables.dtype != torch.int32 or not block_tables.is_cpu or (one != 1 and block_tables.shape[1] > 1):
        raise KernelArgumentError("block_tables", "must be int32 with contiguous rows on the CPU")
    return stride

"""Attention straight on the paged cache, and the store that fills it."""

from __future__ import annotations

import ctypes
import math

import torch

from baton.engine.runner.kernels.errors import KernelArgumentError
from baton.engine.runner.kernels.library import DTYPES, check_status, library

MAX_HEAD_DIM = 256


class _AttentionCall(ctypes.Structure):
    """struct attention_call of csrc/kernels.h."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("query", "out", "cache")]
        + [(name, ctypes.c_int64) for name in ("block_stride", "value_offset", "head_stride")]
        + [(name, ctypes.c_void_p) for name in ("query_start", "seq_lens", "block_tables")]
        + [(name, ctypes.c_int64) for name in ("rows", "num_seqs", "table_width", "num_blocks")]
        + [(name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "block_size", "window")]
        + [(name, ctypes.c_float) for name in ("scale", "softcap")]
    )


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of query [rows, heads, head_dim] straight on the paged cache.

    kv_cache is [blocks, layers, 2, kv_heads, block_size, head_dim]; query and cache are float32 or bfloat16. Request s
    has the query rows query_start[s] to query_start[s + 1] (int32 [seqs + 1]); they are the last of its seq_lens[s]
    tokens (int32 [seqs]), whose keys and values lie in the blocks block_tables[s] (int32 [seqs, width]). With a window,
    position i sees the positions above i - window; with a softcap, scores become softcap * tanh(score / softcap).
    Returns [rows, heads, head_dim], zero in rows past the last request's. A row's bits depend on its query and its own
    keys and values alone. Raises KernelArgumentError for what doesn't fit, and for a head_dim that is not a multiple of
    8 or above 256.
    """
    if query.ndim != 3:
        raise KernelArgumentError("query", f"must have three dimensions, has {query.ndim}")
    rows, heads, head_dim = query.shape
    _require_cpu("query", query, kv_cache.dtype)
    kv_heads, block_size = _require_cache(kv_cache, layer, head_dim)
    if heads == 0 or heads % kv_heads != 0:
        raise KernelArgumentError("query", f"{heads} heads can't share {kv_heads} key/value heads evenly")
    if not math.isfinite(scale):
        raise KernelArgumentError("scale", f"must be finite, is {scale}")
    if window is not None and window < 1:
        raise KernelArgumentError("window", f"must be at least 1, is {window}")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise KernelArgumentError("softcap", f"must be positive, is {softcap}")
    _require_cpu("query_start", query_start, torch.int32)
    _require_cpu("seq_lens", seq_lens, torch.int32)
    _require_cpu("block_tables", block_tables, torch.int32)
    if seq_lens.ndim != 1 or query_start.shape != (seq_lens.shape[0] + 1,):
        raise KernelArgumentError("query_start", "must have one element more than seq_lens")
    if block_tables.ndim != 2 or block_tables.shape[0] != seq_lens.shape[0]:
        raise KernelArgumentError("block_tables", "must have one row for each of seq_lens")
    out = torch.empty_like(query)
    block_stride, layer_stride, value_offset, head_stride = kv_cache.stride()[:4]
    call = _AttentionCall(
        query=query.data_ptr(),
        out=out.data_ptr(),
        cache=kv_cache.data_ptr() + layer * layer_stride * kv_cache.element_size(),
        block_stride=block_stride,
        value_offset=value_offset,
        head_stride=head_stride,
        query_start=query_start.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        block_tables=block_tables.data_ptr(),
        rows=rows,
        num_seqs=seq_lens.shape[0],
        table_width=block_tables.shape[1],
        num_blocks=kv_cache.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        window=window or 0,
        scale=scale,
        softcap=softcap or 0.0,
    )
    lib = library()
    check_status(
        lib.functions.baton_attention(lib.isa, DTYPES[query.dtype], ctypes.byref(call), torch.get_num_threads())
    )
    return out


def store_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    """Write key and value [rows, kv_heads, head_dim] into a layer of the cache.

    Row t goes to slot slots[t] (int64 [rows]) = block * block_size + offset; a negative slot is padding and is skipped.
    Raises KernelArgumentError for what doesn't fit; then nothing has been written.
    """
    if key.ndim != 3 or key.shape != value.shape:
        raise KernelArgumentError(
            "key", f"is {tuple(key.shape)}, value {tuple(value.shape)}; both must be one 3-d shape"
        )
    rows, heads, head_dim = key.shape
    kv_heads, block_size = _require_cache(kv_cache, layer, head_dim)
    if heads != kv_heads:
        raise KernelArgumentError("key", f"has {heads} heads, the cache {kv_heads}")
    _require_cpu("key", key, kv_cache.dtype)
    _require_cpu("value", value, kv_cache.dtype)
    _require_cpu("slots", slots, torch.int64)
    if slots.shape != (rows,):
        raise KernelArgumentError("slots", f"must be [{rows}], is {tuple(slots.shape)}")
    size = kv_cache.element_size()
    block_stride, layer_stride, value_offset, head_stride = (stride * size for stride in kv_cache.stride()[:4])
    check_status(
        library().functions.baton_store_kv(
            key.data_ptr(),
            value.data_ptr(),
            kv_cache.data_ptr() + layer * layer_stride,
            slots.data_ptr(),
            rows,
            kv_heads,
            kv_cache.shape[0],
            block_size,
            head_dim * size,
            block_stride,
            value_offset,
            head_stride,
        )
    )


def _require_cache(kv_cache: torch.Tensor, layer: int, head_dim: int) -> tuple[int, int]:
    """The cache's kv_heads and block_size."""
    if kv_cache.ndim != 6 or kv_cache.shape[2] != 2:
        raise KernelArgumentError(
            "kv_cache", f"must be [blocks, layers, 2, kv_heads, block_size, head_dim], is {tuple(kv_cache.shape)}"
        )
    if kv_cache.dtype not in DTYPES or not kv_cache.is_cpu:
        raise KernelArgumentError("kv_cache", f"must be float32 or bfloat16 on the CPU, is {kv_cache.dtype}")
    _, layers, _, kv_heads, block_size, cache_dim = kv_cache.shape
    if kv_heads == 0 or block_size == 0:
        raise KernelArgumentError("kv_cache", f"has an empty dimension: {tuple(kv_cache.shape)}")
    if kv_cache.stride(5) != 1 or kv_cache.stride(4) != cache_dim:
        raise KernelArgumentError("kv_cache", "the tokens of a block and head must be contiguous")
    if not 0 <= layer < layers:
        raise KernelArgumentError("layer", f"{layer} is not one of {layers}")
    if head_dim != cache_dim:
        raise KernelArgumentError("kv_cache", f"has head_dim {cache_dim}, not {head_dim}")
    if head_dim % 8 != 0 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise KernelArgumentError("head_dim", f"must be a multiple of 8 from 8 to {MAX_HEAD_DIM}, is {head_dim}")
    return kv_heads, block_size


def _require_cpu(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise KernelArgumentError(name, f"must be {dtype}, is {tensor.dtype}")
    if not tensor.is_cpu:
        raise KernelArgumentError(name, f"must be on the CPU, is on {tensor.device}")
    if not tensor.is_contiguous():
        raise KernelArgumentError(name, "is not contiguous")

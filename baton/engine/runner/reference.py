"""The operations in plain numpy, one row at a time: slow, obviously row-invariant, what the kernels are tested against.

A row is computed by the same calls on the same shapes whatever its neighbours are, in float32, and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight as float32 [N, K]."""

    rows: Array


def numerics() -> str:
    return "reference-1"


def _array(tensor: torch.Tensor) -> Array:
    return np.ascontiguousarray(tensor.detach().to(torch.float32).numpy())


def pack(weight: torch.Tensor) -> PackedWeight:
    return PackedWeight(_array(weight).copy())


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = _array(x)
    out = np.empty((rows.shape[0], weight.rows.shape[0]), dtype=np.float32)
    for index, row in enumerate(rows):
        np.dot(weight.rows, row, out=out[index])
    if bias is not None:
        out += _array(bias)
    return torch.from_numpy(out).to(x.dtype)


def store_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    block_size = kv_cache.shape[4]
    kept = slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    kv_cache[blocks, layer, 0, :, offsets] = key[kept]
    kv_cache[blocks, layer, 1, :, offsets] = value[kept]


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
    out = torch.zeros_like(query)
    starts: list[Any] = query_start.tolist()
    for sequence, length in enumerate(seq_lens.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        blocks = block_tables[sequence, : -(-length // kv_cache.shape[4])].long()
        # [blocks, 2, KH, block_size, D] -> [2, KH, tokens, D]
        history = _array(kv_cache[blocks, layer].permute(1, 2, 0, 3, 4).flatten(2, 3))
        for row in range(first, last):
            stop = length - (last - 1 - row)
            start = max(0, stop - window) if window else 0
            out[row] = torch.from_numpy(_attend(_array(query[row]), history[:, :, start:stop], scale, softcap)).to(
                query.dtype
            )
    return out


def _attend(query: Array, history: Array, scale: float, softcap: float | None) -> Array:
    """One row: query [H, D], history [2, KH, L, D]; returns [H, D]."""
    keys, values = history
    grouped = query.reshape(keys.shape[0], -1, query.shape[-1])
    scores = np.einsum("hgd,hld->hgl", grouped, keys, optimize=False) * np.float32(scale)
    if softcap:
        scores = np.tanh(scores / np.float32(softcap)) * np.float32(softcap)
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, dtype=np.float32)
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.einsum("hgl,hld->hgd", weights, values, optimize=False)
    return np.asarray(out.reshape(query.shape), dtype=np.float32)

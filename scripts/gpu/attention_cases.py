"""What starts the attention kernels as layers of models do, for compiling them where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.attention_work.dealing import SPLIT, Int32Array
from baton.runner.backends.attention_work.step_work import StepWork
from baton.runner.backends.cuda.triton_attention import triton_attention
from baton.runner.backends.paged_cache import CacheView

_HEADS, _KV_HEADS, _BLOCK_SIZE = 32, 8, 16


def attention_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """A name, and what starts kernels."""
    for dim in (64, 128, 256):
        plain = AttentionFeatures(dim**-0.5)
        other = AttentionFeatures(dim**-0.5, window=100, softcap=30.0, sinks=torch.empty(_HEADS, dtype=torch.bfloat16))
        shared = np.zeros((2, 8), np.int32)
        shared[0] = np.arange(8)
        for name, counts, length, how, sharing in (
            ("decode of short sequences", [1] * 8, 40, plain, None),
            ("decode of long sequences, and their merge", [1] * 8, 8 * SPLIT, plain, None),
            ("decode of sequences that share a split", [1] * 8, SPLIT + 9, plain, shared),
            ("decode with a window, a soft cap and sinks", [1] * 8, 40, other, None),
            ("drafts", [5] * 8, 40, plain, None),
            ("prompts", [512] * 8, 2 * SPLIT, plain, None),
            ("prompts with a window, a soft cap and sinks", [512] * 8, 2 * SPLIT, other, None),
            ("end of a long prompt", [64], 64 * SPLIT, plain, None),
        ):
            yield f"attention, heads of {dim}: {name}", partial(_attend, dim, counts, length, how, sharing)
        for cache_dtype in (torch.int8, torch.float8_e4m3fn):
            for name, counts, length in (("decode", [1] * 8, 8 * SPLIT), ("prompts", [512] * 8, 2 * SPLIT)):
                start = partial(_attend, dim, counts, length, plain, None, cache_dtype)
                yield f"attention, heads of {dim}, {cache_dtype}: {name}", start


def _attend(
    dim: int,
    counts: list[int],
    length: int,
    how: AttentionFeatures,
    sharing: Int32Array | None,
    cache_dtype: torch.dtype = torch.bfloat16,
) -> object:
    half, width = _KV_HEADS * _BLOCK_SIZE * dim, length // _BLOCK_SIZE + 1
    scales = 2 * half if cache_dtype != torch.bfloat16 else None
    stride = 2 * half + (0 if scales is None else 4 * _KV_HEADS * _BLOCK_SIZE)
    memory = torch.empty(stride, dtype=cache_dtype)
    cache = CacheView(memory, 1, stride, 0, half, _KV_HEADS, _BLOCK_SIZE, dim, dim, scales)
    starts, lengths = np.cumsum([0, *counts]).astype(np.int32), np.full(len(counts), length, np.int32)
    return triton_attention(
        AttentionCall(
            torch.empty(sum(counts), _HEADS, dim, dtype=torch.bfloat16),
            cache,
            torch.from_numpy(starts),
            torch.from_numpy(lengths),
            torch.zeros(len(counts), width, dtype=torch.int32),
            how,
            work=StepWork(starts, lengths, torch.device("cpu"), sharing),
        )
    )

"""Keys and values in 8 bits: the C kernels against torch, and against a cache that holds the widened numbers."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from itertools import product

import pytest
import torch

from baton.runner.backends import paged_cache
from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.paged_cache import CacheView
from baton.runner.backends.torch_operations import TorchOperations
from tests.support import reference_operations as reference
from tests.support.kernel_inputs import randn
from tests.support.pairs import all_pairs

FORMATS = tuple(paged_cache.LARGEST_CODE)
ROWS = (torch.float32, torch.bfloat16)
ISAS = kernels.available().isas
BLOCKS, HEADS, KV_HEADS, SIZE = 24, 6, 2, 16
KEY_DIM, VALUE_DIM = 40, 24


def _cache(
    dtype: torch.dtype, key_dim: int = KEY_DIM, value_dim: int = VALUE_DIM, *, values_in_keys: bool = False
) -> CacheView:
    """A cache with another layer before and behind this one, whose bytes are all ones: NaN in every format."""
    key_offset = 128
    value_offset = key_offset if values_in_keys else key_offset + KV_HEADS * SIZE * key_dim
    scale_offset = key_offset + KV_HEADS * SIZE * (key_dim + (0 if values_in_keys else value_dim))
    stride = scale_offset + KV_HEADS * SIZE * 4 + 64
    memory = torch.full((BLOCKS * stride * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
    scales = scale_offset if dtype in FORMATS else None
    return CacheView(
        memory,
        BLOCKS,
        stride,
        key_offset,
        value_offset,
        KV_HEADS,
        SIZE,
        key_dim,
        value_dim,
        scales,
        values_in_keys=values_in_keys,
    )


def _bytes(cache: CacheView) -> torch.Tensor:
    return cache.memory.view(torch.uint8)


@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("cache_format", FORMATS)
def test_the_kernels_write_the_bytes_that_torch_writes(cache_format: torch.dtype, dtype: torch.dtype) -> None:
    magnitudes = torch.logspace(-30, 30, 200)[:, None, None]
    key = (randn(200, KV_HEADS, KEY_DIM, seed=1) * magnitudes).to(dtype)
    value = (randn(200, KV_HEADS, VALUE_DIM, seed=2) * magnitudes.flip(0)).to(dtype)
    key[3], value[5, 1] = 0, 0  # all zeros
    key[7, 0, 4], value[9, 1, 2], key[11, 1, 0] = float("nan"), float("inf"), float("-inf")
    slots = torch.randperm(BLOCKS * SIZE, generator=torch.Generator().manual_seed(3))[:200]
    slots[17] = -1
    theirs, ours = _cache(cache_format), _cache(cache_format)
    TorchOperations(1).store_kv(key, value, theirs, slots)
    kernels.store_kv(key, value, ours, slots)
    assert torch.equal(_bytes(ours), _bytes(theirs))
    one_by_one = _cache(cache_format)
    for row in range(200):
        kernels.store_kv(key[row : row + 1], value[row : row + 1], one_by_one, slots[row : row + 1])
    assert torch.equal(_bytes(one_by_one), _bytes(ours))


@pytest.mark.parametrize("cache_format", FORMATS)
def test_a_number_is_read_within_the_rounding_of_its_format(cache_format: torch.dtype) -> None:
    numbers = randn(300, KEY_DIM, seed=4)
    codes, scales = paged_cache.narrow(numbers, cache_format)
    error = (paged_cache.widen(codes, scales, torch.float32) - numbers).abs()
    step = scales.float()[:, None]
    if cache_format == torch.int8:
        # Half a step, and up to half a step more where rounding the scale down cut the largest number off.
        assert bool((error <= step).all())
        assert bool((error <= 0.5 * step + 1e-6)[codes.abs() < 127].all())
    else:
        # 3 bits of mantissa: a sixteenth of the number; below 2^-6 steps a multiple of 2^-9.
        assert bool((error <= numbers.abs() / 16 + step * 2.0**-10 + 1e-6).all())


@pytest.mark.parametrize("cache_format", FORMATS)
def test_a_number_that_is_not_finite_makes_its_whole_key_nan(cache_format: torch.dtype) -> None:
    codes, scales = paged_cache.narrow(torch.tensor([[1.0, float("inf")], [1.0, 2.0]]), cache_format)
    read = paged_cache.widen(codes, scales, torch.float32)
    assert read.isnan().tolist() == [[True, True], [False, False]]


@all_pairs(
    {
        # Which instructions widen codes, and how many at a time, depends on all three.
        "isa, dtype, cache_format": list(product(ISAS, ROWS, FORMATS)),
        "key_dim, value_dim": [(64, 64), (KEY_DIM, VALUE_DIM), (128, 96)],
        "window": [None, 70],
        "values_in_keys": [False, True],
    }
)
def test_attention_has_the_bits_of_a_cache_that_holds_the_widened_numbers(
    isa: str,
    dtype: torch.dtype,
    cache_format: torch.dtype,
    key_dim: int,
    value_dim: int,
    window: int | None,
    values_in_keys: bool,
) -> None:
    kernels.use_isa(isa)
    lengths, query_lens = [128, 5, 66], [3, 5, 1]
    narrow, wide = (_cache(of, key_dim, value_dim, values_in_keys=values_in_keys) for of in (cache_format, dtype))
    tables = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(5)).view(3, 8).to(torch.int32)
    for sequence, length in enumerate(lengths):
        key = randn(length, KV_HEADS, key_dim, seed=sequence, dtype=dtype)
        value = randn(length, KV_HEADS, value_dim, seed=10 + sequence, dtype=dtype)
        positions = torch.arange(length)
        slots = tables[sequence, positions // SIZE].long() * SIZE + positions % SIZE
        kernels.store_kv(key, None if values_in_keys else value, narrow, slots)
        wide_key, wide_value = (
            paged_cache.widen(*paged_cache.narrow(rows, cache_format), dtype) for rows in (key, value)
        )
        kernels.store_kv(wide_key, None if values_in_keys else wide_value, wide, slots)
    query = randn(sum(query_lens), HEADS, key_dim, seed=20, dtype=dtype)
    asked = (
        torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        tables,
    )
    how = AttentionFeatures(0.2, window)
    results = [kernels.paged_attention(AttentionCall(query, cache, *asked, how), threads=2) for cache in (narrow, wide)]
    assert torch.equal(results[0], results[1])
    assert results[0].isfinite().all()
    for other in (TorchOperations(1), reference):
        theirs = other.paged_attention(AttentionCall(query, narrow, *asked, how))
        assert torch.allclose(theirs.float(), results[0].float(), atol=2e-5 if dtype == torch.float32 else 2e-2)


def _before_an_inaccessible_page(size: int) -> torch.Tensor:
    """Memory of this many bytes; a load from an address behind it ends the process with a segmentation fault."""
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, room + mmap.PAGESIZE)
    memory = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=room - size)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(memory.data_ptr() + size, mmap.PAGESIZE, 0) == 0
    return memory


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("cache_format", [None, *FORMATS])
def test_attention_reads_nothing_behind_the_cache(
    isa: str, dtype: torch.dtype, cache_format: torch.dtype | None
) -> None:
    kernels.use_isa(isa)
    for dim in (8, 24, 40, 64):
        for keys_last in (False, True):
            _check_that_nothing_behind_is_read(dtype, cache_format, dim, keys_last=keys_last)


def _check_that_nothing_behind_is_read(
    dtype: torch.dtype, cache_format: torch.dtype | None, dim: int, *, keys_last: bool
) -> None:
    """With one head and blocks of one token, the last number of the cache is that of its last key or value."""
    tokens, scales = 130, None if cache_format is None else 0
    first = 0 if cache_format is None else 4
    key_offset, value_offset = (first + dim, first) if keys_last else (first, first + dim)
    stored = dtype if cache_format is None else cache_format
    memory = _before_an_inaccessible_page(tokens * (first + 2 * dim) * stored.itemsize).view(stored)
    cache = CacheView(memory, tokens, first + 2 * dim, key_offset, value_offset, 1, 1, dim, dim, scales)
    key, value = (randn(tokens, 1, dim, seed=seed, dtype=dtype) for seed in (1, 2))
    kernels.store_kv(key, value, cache, torch.arange(tokens))
    elsewhere = replace(cache, memory=memory.clone())
    tables = torch.arange(tokens, dtype=torch.int32)[None]
    for length in (1, 16, 64, tokens):  # the last tokens of the cache
        for rows in {1, min(length, 3)}:
            asked = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
            query, blocks = randn(rows, 2, dim, seed=3, dtype=dtype), tables[:, tokens - length :]
            ours, theirs = (
                kernels.paged_attention(AttentionCall(query, view, *asked, blocks, AttentionFeatures(0.2)), threads=1)
                for view in (cache, elsewhere)
            )
            assert torch.equal(ours, theirs)


@all_pairs(
    {
        "isa": ISAS,
        "dtype, cache_format": list(product(ROWS, FORMATS)),
        "scale": [2.0**-100, 0.37, 2.0**100],
    }
)
def test_every_code_is_read_as_torch_reads_it(
    isa: str, dtype: torch.dtype, cache_format: torch.dtype, scale: float
) -> None:
    kernels.use_isa(isa)
    cache = _cache(cache_format, 64, 256)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN in float8
    codes = torch.stack([codes, codes.flip(0)])
    scales = torch.full((2,), scale, dtype=torch.bfloat16)
    key_codes, value_codes = paged_cache.keys_and_values(cache)
    key_scales, value_scales = paged_cache.scales(cache)
    key_codes.view(torch.uint8)[3, :, 0], value_codes.view(torch.uint8)[3, :, 0] = 0, codes
    key_scales[3, :, 0], value_scales[3, :, 0] = 1, scales
    call = AttentionCall(
        torch.zeros(1, KV_HEADS, 64, dtype=dtype),
        cache,
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([[3]], dtype=torch.int32),
        AttentionFeatures(1.0),
    )
    out = kernels.paged_attention(call, threads=1)
    assert torch.equal(out[0], paged_cache.widen(codes.view(cache_format), scales, dtype))


def test_a_cache_in_8_bits_without_room_for_scales_is_refused() -> None:
    cache = _cache(torch.int8)
    key, value = randn(1, KV_HEADS, KEY_DIM), randn(1, KV_HEADS, VALUE_DIM)
    for wrong in (
        replace(cache, scale_offset=None),
        replace(cache, scale_offset=cache.block_stride - KV_HEADS * SIZE * 4 + 2),
        replace(cache, scale_offset=int(cache.scale_offset or 0) + 1),
        replace(_cache(torch.float32), scale_offset=0),
    ):
        with pytest.raises(KernelArgumentError) as refusal:
            kernels.store_kv(key, value, wrong, torch.zeros(1, dtype=torch.int64))
        assert refusal.value.argument == "cache"

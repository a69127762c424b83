"""Requests that share leading blocks attend to them together, with the bits that each of them has alone.

`BATON_FUZZ_EXAMPLES=1000` tries that many steps for each instruction set and dtype.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import CacheView
from baton.runner.backends.cpu.kernels.call_structs import KernelAttentionCall
from baton.runner.backends.cpu.kernels.library import CACHE_FORMATS, library
from tests.support.kernel_inputs import randn

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

ISAS = kernels.available().isas
DTYPES = (torch.float32, torch.bfloat16)
TILE = 64


def _cache(
    dtype: torch.dtype, rows: torch.dtype, blocks: int, kv_heads: int, size: int, dims: tuple[int, int]
) -> CacheView:
    """A cache with random keys and values in all slots, and bytes of ones (NaN in every format) around them."""
    key_dim, value_dim = dims
    value_offset = 64 + kv_heads * size * key_dim
    scale_offset = value_offset + kv_heads * size * value_dim
    scales = scale_offset if dtype in CACHE_FORMATS else None
    stride = scale_offset + kv_heads * size * 4 + 64
    memory = torch.full((blocks * stride * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
    cache = CacheView(memory, blocks, stride, 64, value_offset, kv_heads, size, key_dim, value_dim, scales)
    key = randn(blocks * size, kv_heads, key_dim, seed=1, dtype=rows)
    value = randn(blocks * size, kv_heads, value_dim, seed=2, dtype=rows)
    kernels.store_kv(key, value, cache, torch.arange(blocks * size))
    return cache


def _tables(random: Random, lengths: Sequence[int], size: int, blocks: int) -> torch.Tensor:
    """Block tables that begin as some earlier one's, up to a random block, and continue with blocks of their own."""
    tables = torch.full((len(lengths), max(-(-length // size) for length in lengths)), -1, dtype=torch.int32)
    unused = iter(random.sample(range(blocks), blocks))
    for seq, length in enumerate(lengths):
        width = -(-length // size)
        same = 0
        if seq and random.random() < 0.8:
            parent = random.randrange(seq)
            same = min(random.choice([width, random.randint(0, width)]), -(-lengths[parent] // size))
            tables[seq, :same] = tables[parent, :same]
        tables[seq, same:width] = torch.tensor([next(unused) for _ in range(same, width)], dtype=torch.int32)
    return tables


@dataclass
class Step:
    """Requests of a step; rows of the query are float32 or bfloat16."""

    cache: CacheView
    tables: torch.Tensor
    lengths: list[int]
    query_lens: list[int]
    query: torch.Tensor
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    distance_bias: torch.Tensor | None = None

    def attend(self, seqs: Sequence[int], threads: int) -> list[torch.Tensor]:
        """The rows of each of some requests, computed in one call, in this order."""
        starts = [sum(self.query_lens[:seq]) for seq in seqs]
        rows = [self.query[start : start + self.query_lens[seq]] for start, seq in zip(starts, seqs, strict=True)]
        counts = [self.query_lens[seq] for seq in seqs]
        call = AttentionCall(
            torch.cat(rows),
            self.cache,
            torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            torch.tensor([self.lengths[seq] for seq in seqs], dtype=torch.int32),
            self.tables[list(seqs)],
            AttentionFeatures(0.3, self.window, self.softcap, self.sinks, distance_bias=self.distance_bias),
        )
        return list(torch.split(kernels.paged_attention(call, threads=threads), counts))

    def shared_tiles(self, threads: int = 2) -> list[int]:
        """How many tiles of each request are attended to together with another request."""
        starts = torch.tensor([0, *self.query_lens]).cumsum(0).to(torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        call = KernelAttentionCall(
            query_start=starts.data_ptr(),
            seq_lens=lengths.data_ptr(),
            block_tables=self.tables.data_ptr(),
            num_seqs=len(self.lengths),
            table_width=self.tables.shape[1],
            table_stride=self.tables.stride(0),
            heads=self.query.shape[1],
            kv_heads=self.cache.num_kv_heads,
            value_dim=self.cache.value_dim,
            block_size=self.cache.block_size,
            window=self.window or 0,
        )
        tiles = (ctypes.c_int32 * len(self.lengths))()
        assert library().functions.baton_shared_tiles(ctypes.byref(call), threads, tiles) == 0
        return list(tiles)


def _decodes(tables: list[list[int]], lengths: list[int], *, size: int = 16, heads: int = 6, **fields: object) -> Step:
    """Requests of one query token each, with these blocks."""
    width = max(map(len, tables))
    padded = torch.tensor([[*table, *[-1] * (width - len(table))] for table in tables], dtype=torch.int32)
    cache = _cache(torch.bfloat16, torch.bfloat16, int(padded.max()) + 1, 2, size, (32, 32))
    query = randn(len(tables), heads, 32, seed=3, dtype=torch.bfloat16)
    return Step(cache, padded, lengths, [1] * len(tables), query, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=int(os.environ.get("BATON_FUZZ_EXAMPLES", "10")))
@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(2, 24),
    block_size=st.sampled_from([1, 7, 16, 32, 64, 100, 128]),
    cache_format=st.sampled_from([None, *CACHE_FORMATS]),
    heads=st.sampled_from([(2, 2), (6, 2), (7, 1), (9, 3), (40, 1), (71, 1)]),
    dims=st.sampled_from([(32, 32), (64, 64), (24, 40), (192, 128), (72, 8)]),
    window=st.sampled_from([None, None, 30, 200, 1000]),
    with_more=st.booleans(),
    distances=st.sampled_from([None, None, 1, 70, 500]),
)
def test_rows_that_share_tiles_have_the_bits_that_they_have_alone(
    isa: str,
    dtype: torch.dtype,
    seed: int,
    count: int,
    block_size: int,
    cache_format: torch.dtype | None,
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    with_more: bool,
    distances: int | None,
) -> None:
    kernels.use_isa(isa)
    random = Random(seed)
    if isa == "portable":
        count = min(count, 6)  # it takes twenty times as long as the others
    lengths = [random.choice([random.randint(1, 450), 320, 321]) for _ in range(count)]
    query_lens = [min(length, random.choice([1, 1, 1, 2, 5, 9])) for length in lengths]
    blocks = sum(-(-length // block_size) for length in lengths)
    step = Step(
        _cache(cache_format or dtype, dtype, blocks, heads[1], block_size, dims),
        _tables(random, lengths, block_size, blocks),
        lengths,
        query_lens,
        randn(sum(query_lens), heads[0], dims[0], seed=3, dtype=dtype),
        window,
        30.0 if with_more and distances is None else None,
        randn(heads[0], seed=4) if with_more else None,
        None if distances is None else randn(heads[0], distances, seed=5),
    )
    alone = [step.attend([seq], 1)[0] for seq in range(count)]
    order = random.sample(range(count), count)
    for threads in (1, 2, 5):
        for seq, rows in zip(order, step.attend(order, threads), strict=True):
            assert rows.isfinite().all()
            assert torch.equal(rows, alone[seq]), (seq, threads, step.shared_tiles(threads))


def test_tiles_are_shared_by_all_whose_tables_begin_alike() -> None:
    common = list(range(16))  # four tiles
    step = _decodes(
        [[*common, 16], [*common[:8], *range(17, 26)], [*common, 26], [30, *common[1:]]], [257, 260, 272, 256]
    )
    assert step.shared_tiles() == [4, 2, 4, 0]


def test_requests_that_share_more_are_neighbours_in_whatever_order_they_come() -> None:
    long, short = list(range(16)), [*range(4), *range(20, 32)]
    step = _decodes([long, short, long, short, [40, 41, 42, 43]], [256, 255, 256, 250, 64])
    assert step.shared_tiles() == [4, 3, 4, 3, 0]


@pytest.mark.parametrize(("length", "tiles"), [(63, 0), (64, 1), (127, 1), (128, 2)])
def test_a_tile_is_shared_only_when_all_rows_see_all_of_it(length: int, tiles: int) -> None:
    table = list(range(8))
    assert _decodes([table, table], [length, 128]).shared_tiles() == [tiles, tiles]


def test_a_block_is_shared_whole_or_in_whole_tiles() -> None:
    step = _decodes([[0, 1, 2], [0, 1, 3]], [300, 300], size=100)
    assert step.shared_tiles() == [200 // TILE, 200 // TILE]


def test_requests_with_a_window_share_only_while_they_see_all_keys() -> None:
    tables = [list(range(16)), list(range(16)), list(range(16))]
    step = _decodes(tables, [200, 200, 201], window=200)
    assert step.shared_tiles() == [3, 3, 0]


def test_pieces_of_prompts_and_heads_that_fill_a_task_share_nothing() -> None:
    table = list(range(16))
    step = _decodes([table] * 3, [256, 256, 256])
    step.query_lens, step.query = [9, 8, 8], randn(25, 6, 32, seed=3, dtype=torch.bfloat16)
    assert step.shared_tiles() == [0, 3, 3]
    assert _decodes([table] * 2, [256, 256], heads=130).shared_tiles() == [0, 0]


def test_more_requests_than_a_task_has_rows_for_share_in_several_tasks() -> None:
    step = _decodes([list(range(8))] * 100, [128] * 100, heads=34)
    assert step.shared_tiles() == [2] * 100
    alone = [step.attend([seq], 1)[0] for seq in range(100)]
    assert torch.equal(torch.cat(step.attend(range(100), 2)), torch.cat(alone))

"""Attention on the paged cache against float64, and the promise that a row's bits depend on the row alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import CacheView, KernelArgumentError
from baton.runner.backends.key_selection import SelectionCall, select_by_torch
from baton.runner.backends.torch_operations import TorchOperations
from tests.support.kernel_inputs import DTYPES, randn, relative_error
from tests.support.pairs import all_pairs

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

ISAS = kernels.available().isas
SAME_BITS = [isa for isa in ISAS if isa != "amx_bf16"]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.2e-3}


def _cache(blocks: int, heads: int, size: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> CacheView:
    """A cache full of NaN, with a layer before and one behind this layer, and a gap between keys and values."""
    key_offset, gap = 72, 16
    value_offset = key_offset + heads * size * key_dim + gap
    stride = value_offset + heads * size * value_dim + 40
    memory = torch.full((blocks * stride,), float("nan"), dtype=dtype)
    return CacheView(memory, blocks, stride, key_offset, value_offset, heads, size, key_dim, value_dim)


def _keys_and_values(cache: CacheView) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of keys and values [blocks, kv_heads, block_size, dim]."""
    views = []
    for offset, dim in ((cache.key_offset, cache.key_dim), (cache.value_offset, cache.value_dim)):
        size = (cache.num_blocks, cache.num_kv_heads, cache.block_size, dim)
        stride = (cache.block_stride, cache.block_size * dim, dim, 1)
        views.append(cache.memory.as_strided(size, stride, offset))
    return views[0], views[1]


@dataclass
class Paged:
    """Requests whose keys and values are scattered over a cache full of NaN."""

    cache: CacheView
    tables: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    sinks: torch.Tensor | None = None
    distance_bias: torch.Tensor | None = None

    @classmethod
    def make(
        cls,
        dtype: torch.dtype,
        *,
        lengths: list[int],
        query_lens: list[int],
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 32,
        value_dim: int | None = None,
        block_size: int = 16,
        placement: int = 0,
        seed: int = 0,
    ) -> Paged:
        """Request i's tensors depend on seed + i; placement chooses the blocks."""
        width = max(-(-length // block_size) for length in lengths) + 1
        blocks = width * len(lengths) + 3
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(placement))
        tables = order[: width * len(lengths)].view(len(lengths), width).to(torch.int32)
        value_dim = head_dim if value_dim is None else value_dim
        cache = _cache(blocks, kv_heads, block_size, head_dim, value_dim, dtype)
        queries, keys, values = [], [], []
        for i, length in enumerate(lengths):
            key = randn(length, kv_heads, head_dim, seed=10 * (seed + i), dtype=dtype)
            value = randn(length, kv_heads, value_dim, seed=10 * (seed + i) + 1, dtype=dtype)
            position = torch.arange(length)
            slots = tables[i, position // block_size].long() * block_size + position % block_size
            kernels.store_kv(key, value, cache, slots)
            queries.append(
                randn(length, heads, head_dim, seed=10 * (seed + i) + 2, dtype=dtype)[length - query_lens[i] :]
            )
            keys.append(key)
            values.append(value)
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        return cls(cache, tables, starts, torch.tensor(lengths, dtype=torch.int32), torch.cat(queries), keys, values)

    def attend(
        self,
        window: int | None = None,
        softcap: float | None = None,
        threads: int = 2,
        ahead: int = 0,
        in_chunks: bool = False,
    ) -> torch.Tensor:
        how = AttentionFeatures(0.3, window, softcap, self.sinks, ahead, self.distance_bias, in_chunks)
        return kernels.paged_attention(self.call(how), threads=threads)

    def call(self, how: AttentionFeatures) -> AttentionCall:
        return AttentionCall(self.query, self.cache, self.query_start, self.seq_lens, self.tables, how)

    def expected(
        self, window: int | None = None, softcap: float | None = None, ahead: int = 0, in_chunks: bool = False
    ) -> torch.Tensor:
        out = []
        for i, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            query = self.query[int(self.query_start[i]) : int(self.query_start[i + 1])].double()
            group = query.shape[1] // key.shape[1]
            scores = torch.einsum("qhd,khd->hqk", query, key.double().repeat_interleave(group, 1)) * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            at = torch.arange(len(key) - len(query), len(key))[:, None]
            key_at = torch.arange(len(key))[None]
            if self.distance_bias is not None:
                distances = (at - key_at).clamp(0, self.distance_bias.shape[1] - 1)
                scores = scores + self.distance_bias.double()[:, distances]
            seen = key_at <= at + ahead
            if window is not None:
                seen &= (key_at // window == at // window) if in_chunks else (key_at > at - window)
            scores = scores.masked_fill(~seen, float("-inf"))
            if self.sinks is not None:
                sinks = self.sinks.double()[:, None, None].expand(-1, len(query), 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = scores.softmax(-1)[..., : len(key)]
            out.append(torch.einsum("hqk,khd->qhd", weights, value.double().repeat_interleave(group, 1)))
        return torch.cat(out)


@all_pairs(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "window, softcap": [(None, None), (1, None), (20, None), (64, 5.0), (1000, 30.0)],
    }
)
def test_attention_equals_softmax_attention_in_float64(
    isa: str, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    kernels.use_isa(isa)
    paged = Paged.make(dtype, lengths=[1, 64, 90, 200], query_lens=[1, 64, 1, 77], head_dim=40)
    assert relative_error(paged.attend(window, softcap), paged.expected(window, softcap)) < TOLERANCE[dtype]


@all_pairs({"isa": ISAS, "dtype": DTYPES, "window, ahead": [(None, 1 << 30), (9, 8), (70, 69), (None, 3), (65, 200)]})
def test_rows_attend_to_keys_behind_their_own(isa: str, dtype: torch.dtype, window: int | None, ahead: int) -> None:
    kernels.use_isa(isa)
    lengths = [1, 64, 90, 200, 7, 128]
    paged = Paged.make(dtype, lengths=lengths, query_lens=lengths, head_dim=40)
    together = paged.attend(window, ahead=ahead)
    assert relative_error(together, paged.expected(window, ahead=ahead)) < TOLERANCE[dtype]
    assert torch.equal(together, paged.attend(window, threads=1, ahead=ahead))
    for place, (length, start) in enumerate(zip(lengths, paged.query_start.tolist(), strict=False)):
        alone = Paged.make(dtype, lengths=[length], query_lens=[length], head_dim=40, seed=place, block_size=7)
        assert torch.equal(alone.attend(window, ahead=ahead), together[start : start + length])


@all_pairs({"isa": ISAS, "dtype": DTYPES, "chunk": [1, 7, 16, 64, 100, 128, 1000]})
def test_rows_attend_to_keys_of_their_own_chunk(isa: str, dtype: torch.dtype, chunk: int) -> None:
    kernels.use_isa(isa)
    paged = Paged.make(dtype, lengths=[1, 64, 90, 200, 400], query_lens=[1, 64, 1, 77, 400], head_dim=40)
    together = paged.attend(chunk, in_chunks=True)
    assert relative_error(together, paged.expected(chunk, in_chunks=True)) < TOLERANCE[dtype]
    for position in (0, 1, 63, 64, 99, 100, 127, 128, 399):
        length = position + 1
        alone = Paged.make(dtype, lengths=[1] * 4 + [length], query_lens=[1] * 5, head_dim=40)
        alone.query, alone.cache, alone.tables = alone.query.clone(), paged.cache, paged.tables
        alone.query[-1] = paged.query[143 + position]
        assert torch.equal(alone.attend(chunk, in_chunks=True)[-1], together[143 + position]), position


@all_pairs({"isa": ISAS, "dtype": DTYPES, "heads, kv_heads": [(6, 2), (40, 1), (130, 1)], "threads": [1, 4]})
def test_a_selection_of_all_keys_changes_no_bit(
    isa: str, dtype: torch.dtype, heads: int, kv_heads: int, threads: int
) -> None:
    kernels.use_isa(isa)
    paged = Paged.make(
        dtype, lengths=[1, 64, 90, 200], query_lens=[1, 64, 1, 77], head_dim=40, heads=heads, kv_heads=kv_heads
    )
    every = torch.full((143, 4), -1, dtype=torch.int64)
    call = replace(paged.call(AttentionFeatures(0.3)), selected=every)
    assert torch.equal(kernels.paged_attention(call, threads=threads), paged.attend())


@pytest.mark.parametrize("isa", ISAS)
def test_keys_in_small_blocks_are_found_in_any_order(isa: str) -> None:
    """The last of 16 keys lies where it would if all were side by side, and those between do not."""
    kernels.use_isa(isa)
    blocks, size, width = 8, 4, 64
    rows = randn(16, 1, width, seed=1, dtype=torch.bfloat16)
    query = randn(1, 4, width, seed=2, dtype=torch.bfloat16)
    found = []
    for order in ([0, 7, 5, 3], [0, 1, 2, 3]):
        memory = torch.zeros(blocks * size * width, dtype=torch.bfloat16)
        cache = CacheView(memory, blocks, size * width, 0, 0, 1, size, width, 32, values_in_keys=True)
        tables = torch.tensor([order], dtype=torch.int32)
        position = torch.arange(16)
        kernels.store_kv(rows, None, cache, tables[0, position // size].long() * size + position % size)
        starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
        call = AttentionCall(query, cache, starts, lengths, tables, AttentionFeatures(0.3))
        found.append(kernels.paged_attention(call, threads=1))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    ("selected", "how"),
    [
        (torch.zeros(2, 4, dtype=torch.int64), AttentionFeatures(0.3)),
        (torch.zeros(1, 3, dtype=torch.int64), AttentionFeatures(0.3)),
        (torch.zeros(1, 4, dtype=torch.int32), AttentionFeatures(0.3)),
        (torch.zeros(1, 4, dtype=torch.int64), AttentionFeatures(0.3, softcap=5.0)),
        (torch.zeros(1, 4, dtype=torch.int64), AttentionFeatures(-0.3)),
    ],
)
def test_a_selection_that_does_not_fit_is_refused(selected: torch.Tensor, how: AttentionFeatures) -> None:
    paged = Paged.make(torch.float32, lengths=[200], query_lens=[1])
    with pytest.raises(KernelArgumentError, match="selected"):
        kernels.paged_attention(replace(paged.call(how), selected=selected), threads=1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_kernels_select_the_keys_that_torch_selects(isa: str, dtype: torch.dtype, threads: int) -> None:
    """The numbers are small whole ones, so that both compute scores exactly, and many are equal.

    Of the rows that are computed together some see no more keys than they may have, and others do.
    """
    kernels.use_isa(isa)
    blocks, size, width, heads = 20, 16, 24, 6
    memory = torch.randint(-2, 3, (blocks * size * width,), generator=torch.Generator().manual_seed(1)).to(dtype)
    cache = CacheView(memory, blocks, size * width, 0, 0, 1, size, width, 8, values_in_keys=True)
    query = torch.randint(-2, 3, (80, heads, 16), generator=torch.Generator().manual_seed(2)).to(dtype)
    weights = torch.randint(-2, 3, (80, heads), generator=torch.Generator().manual_seed(3)).float()
    starts, lengths = torch.tensor([0, 1, 80], dtype=torch.int32), torch.tensor([130, 79], dtype=torch.int32)
    tables = torch.randperm(blocks, generator=torch.Generator().manual_seed(4)).view(2, 10).to(torch.int32)
    call = SelectionCall(query, weights, cache, 8, starts, lengths, tables, 0.5, 40)
    assert torch.equal(kernels.select_keys(call, threads=threads), select_by_torch(call))


@pytest.mark.parametrize(
    "change",
    [
        {"first": 16},
        {"first": 4},
        {"most": 0},
        {"scale": float("nan")},
        {"weights": torch.zeros(1, 5)},
        {"seq_lens": torch.tensor([1000], dtype=torch.int32)},
        {"query": torch.zeros(1, 129, 16), "weights": torch.zeros(1, 129)},
    ],
)
def test_a_selection_of_keys_that_are_not_there_is_refused(change: dict[str, Any]) -> None:
    cache = CacheView(torch.zeros(20 * 16 * 24), 20, 16 * 24, 0, 0, 1, 16, 24, 8, values_in_keys=True)
    one, tables = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    call = SelectionCall(torch.zeros(1, 6, 16), torch.zeros(1, 6), cache, 8, one, one[1:] * 64, tables, 0.5, 3)
    kernels.select_keys(call, threads=1)
    with pytest.raises(KernelArgumentError):
        kernels.select_keys(replace(call, **change), threads=1)


def test_without_kernels_rows_attend_to_keys_of_their_own_chunk() -> None:
    paged = Paged.make(torch.float32, lengths=[1, 90, 200], query_lens=[1, 1, 77], head_dim=16)
    found = TorchOperations(1).paged_attention(paged.call(AttentionFeatures(0.3, 20, in_chunks=True)))
    assert relative_error(found, paged.expected(20, in_chunks=True)) < TOLERANCE[torch.float32]


def test_blocks_of_chunks_before_a_query_need_not_exist() -> None:
    paged = Paged.make(torch.float32, lengths=[200], query_lens=[5], head_dim=32, block_size=8)
    expected = paged.attend(64, in_chunks=True)
    paged.tables[:, : 192 // 8] = -1
    assert torch.equal(paged.attend(64, in_chunks=True), expected)


@pytest.mark.parametrize(("window", "ahead"), [(None, 1 << 30), (300, 299)])
def test_without_kernels_rows_of_a_long_text_attend_block_by_block(window: int | None, ahead: int) -> None:
    lengths = [5, 700]
    paged = Paged.make(torch.float32, lengths=lengths, query_lens=lengths, head_dim=16)
    operations = TorchOperations(1)
    found = operations.paged_attention(paged.call(AttentionFeatures(0.3, window, ahead=ahead)))
    assert relative_error(found, paged.expected(window, ahead=ahead)) < TOLERANCE[torch.float32]
    for features in ({"softcap": 5.0}, {"sinks": torch.zeros(paged.query.shape[1])}):
        with pytest.raises(ValueError, match="neither a soft cap nor sinks"):
            operations.paged_attention(paged.call(AttentionFeatures(0.3, ahead=ahead, **features)))


@all_pairs(
    {
        "dtype": DTYPES,
        "head_dim": [8, 16, 24, 64, 80, 128, 256, 512],
        "heads, kv_heads": [(4, 4), (14, 2), (71, 1), (5, 5)],
    }
)
def test_attention_supports_every_head_shape(dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int) -> None:
    paged = Paged.make(
        dtype, lengths=[70, 33], query_lens=[9, 1], heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=5
    )
    assert relative_error(paged.attend(), paged.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6)
@given(
    length=st.integers(1, 210),
    split=st.lists(st.integers(1, 80), max_size=4),
    window=st.none() | st.integers(1, 150),
    block_size=st.sampled_from([1, 7, 16, 32, 100]),
    group=st.sampled_from([1, 3, 7]),
    placement=st.integers(0, 100),
)
def test_a_row_of_attention_does_not_depend_on_chunks_batch_or_blocks(
    isa: str,
    dtype: torch.dtype,
    length: int,
    split: list[int],
    window: int | None,
    block_size: int,
    group: int,
    placement: int,
) -> None:
    kernels.use_isa(isa)
    heads = {"heads": 2 * group, "kv_heads": 2, "head_dim": 24}
    whole = Paged.make(dtype, lengths=[length], query_lens=[length], **heads).attend(window)
    done = 0
    for chunk in [*split, length]:
        chunk = min(chunk, length - done)
        if chunk == 0:
            break
        done += chunk
        part = Paged.make(
            dtype, lengths=[length, 50], query_lens=[length, 3], block_size=block_size, placement=placement, **heads
        )
        part.seq_lens[0] = done
        part.query = torch.cat([part.query[done - chunk : done], part.query[length:]])
        part.query_start = torch.tensor([0, chunk, chunk + 3], dtype=torch.int32)
        assert torch.equal(part.attend(window)[:chunk], whole[done - chunk : done])


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_by_token_equals_all_at_once(dtype: torch.dtype) -> None:
    whole = Paged.make(dtype, lengths=[140], query_lens=[140])
    expected = whole.attend(window=90, softcap=15.0)
    query = whole.query
    for position in range(140):
        whole.query = query[position : position + 1]
        whole.query_start = torch.tensor([0, 1], dtype=torch.int32)
        whole.seq_lens = torch.tensor([position + 1], dtype=torch.int32)
        assert torch.equal(whole.attend(window=90, softcap=15.0), expected[position : position + 1]), position


@all_pairs({"isa": ISAS, "head_dim": [24, 32, 64, 72, 128], "group": [1, 2, 3, 4, 5, 6, 7, 8, 9, 17]})
def test_one_token_of_any_heads_equals_all_at_once(isa: str, head_dim: int, group: int) -> None:
    kernels.use_isa(isa)
    whole = Paged.make(torch.bfloat16, lengths=[150], query_lens=[87], heads=2 * group, head_dim=head_dim)
    expected = whole.attend()
    query = whole.query
    for position in (63, 64, 127, 128, 149):
        row = position - 63
        whole.query = query[row : row + 1]
        whole.query_start = torch.tensor([0, 1], dtype=torch.int32)
        whole.seq_lens = torch.tensor([position + 1], dtype=torch.int32)
        for threads in (1, 2):
            assert torch.equal(whole.attend(threads=threads), expected[row : row + 1]), position


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (130, 1)])
def test_threads_do_not_change_attention(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    """Many heads of one key are divided among threads."""
    paged = Paged.make(dtype, lengths=[300, 17, 130], query_lens=[200, 1, 5], heads=heads, kv_heads=kv_heads)
    results = [paged.attend(threads=threads) for threads in (1, 2, 5)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    last = Paged.make(dtype, lengths=[300], query_lens=[1], heads=heads, kv_heads=kv_heads)
    for threads in (1, 2, 5, 64):
        assert torch.equal(last.attend(threads=threads), results[0][199:200])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_later_tokens_changes_no_earlier_row(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    paged = Paged.make(dtype, lengths=[150], query_lens=[150])
    clean = paged.attend(window=70)
    block, offset = int(paged.tables[0, 100 // 16]), 100 % 16
    for part in _keys_and_values(paged.cache):
        part[block, :, offset] = float("nan")
    out = paged.attend(window=70)
    assert torch.equal(out[:100], clean[:100])
    assert out[100:].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_outside_the_window_change_no_row(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    paged = Paged.make(dtype, lengths=[150], query_lens=[150])
    clean = paged.attend(window=20)
    block, offset = int(paged.tables[0, 100 // 16]), 100 % 16
    for part in _keys_and_values(paged.cache):
        part[block, :, offset] = float("inf")
    out = paged.attend(window=20)
    assert torch.equal(out[120:], clean[120:])
    assert not out[100:120].isfinite().all(dim=(1, 2)).any()


def test_a_window_wider_than_the_request_changes_nothing() -> None:
    paged = Paged.make(torch.bfloat16, lengths=[150], query_lens=[150])
    assert torch.equal(paged.attend(window=150), paged.attend())
    assert not torch.equal(paged.attend(window=149), paged.attend())


def test_blocks_behind_the_window_need_not_exist() -> None:
    paged = Paged.make(torch.float32, lengths=[150], query_lens=[4])
    expected = paged.attend(window=30)
    paged.tables[0, :7] = -1  # positions 0 to 111; the first seen is 117
    assert torch.equal(paged.attend(window=30), expected)


def test_rows_past_the_last_request_are_zero() -> None:
    paged = Paged.make(torch.bfloat16, lengths=[20], query_lens=[4])
    expected = paged.attend()
    paged.query = torch.cat([paged.query, torch.full_like(paged.query, float("nan"))])
    out = paged.attend()
    assert torch.equal(out[:4], expected)
    assert not out[4:].any()


def test_requests_may_have_no_rows() -> None:
    paged = Paged.make(torch.bfloat16, lengths=[20, 30, 40], query_lens=[4, 1, 2])
    expected = paged.attend()
    paged.query = torch.cat([paged.query[:4], paged.query[5:]])
    paged.query_start = torch.tensor([0, 4, 4, 6], dtype=torch.int32)
    assert torch.equal(paged.attend(), torch.cat([expected[:4], expected[5:]]))


@all_pairs(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "key_dim, value_dim": [(192, 128), (24, 16), (16, 24), (40, 8), (256, 64), (8, 256), (512, 8), (64, 512)],
    }
)
def test_keys_and_values_may_have_different_widths(isa: str, dtype: torch.dtype, key_dim: int, value_dim: int) -> None:
    kernels.use_isa(isa)
    paged = Paged.make(dtype, lengths=[70, 150], query_lens=[9, 1], head_dim=key_dim, value_dim=value_dim, block_size=7)
    out = paged.attend()
    assert out.shape == (10, 6, value_dim)
    assert relative_error(out, paged.expected()) < TOLERANCE[dtype]
    alone = replace(paged, query=paged.query[9:], query_start=torch.tensor([0, 0, 1], dtype=torch.int32)).attend()
    assert torch.equal(alone, out[9:])


@all_pairs({"isa": ISAS, "dtype": DTYPES, "window": [None, 30], "size": [0.5, 30.0]})
def test_sinks_take_probability_and_add_no_value(isa: str, dtype: torch.dtype, window: int | None, size: float) -> None:
    kernels.use_isa(isa)
    paged = Paged.make(dtype, lengths=[70, 150], query_lens=[9, 1])
    plain = paged.attend(window)
    paged.sinks = (size * randn(6, seed=9)).to(dtype)
    assert relative_error(paged.attend(window), paged.expected(window)) < TOLERANCE[dtype]
    paged.sinks = torch.full((6,), float("-inf"))
    assert torch.equal(paged.attend(window), plain)


@all_pairs(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "window": [None, 70],
        "heads, kv_heads": [(14, 2), (71, 1), (4, 4)],
        "distances": [1, 63, 64, 128, 500],
    }
)
def test_scores_have_biases_of_heads_and_distances(
    isa: str, dtype: torch.dtype, window: int | None, heads: int, kv_heads: int, distances: int
) -> None:
    kernels.use_isa(isa)
    paged = Paged.make(
        dtype, lengths=[1, 64, 90, 200, 130], query_lens=[1, 64, 1, 77, 1], heads=heads, kv_heads=kv_heads
    )
    paged.distance_bias = torch.zeros(heads, distances)
    no_bias = paged.attend(window)
    paged.distance_bias = None
    assert torch.equal(paged.attend(window), no_bias)
    paged.distance_bias = 2 * randn(heads, distances, seed=7)
    out = paged.attend(window)
    assert relative_error(out, paged.expected(window)) < TOLERANCE[dtype]
    assert torch.equal(paged.attend(window, threads=1), out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_keys_values_and_tables_may_have_strides(dtype: torch.dtype) -> None:
    paged = Paged.make(dtype, lengths=[70, 33], query_lens=[9, 1])
    expected = paged.attend()
    paged.query = torch.cat([paged.query, torch.full_like(paged.query, float("nan"))], dim=1)[:, :6]
    paged.tables = torch.cat([paged.tables, torch.full_like(paged.tables, -1)], dim=1)[:, : paged.tables.shape[1]]
    assert torch.equal(paged.attend(), expected)
    product = randn(3, 7, 32, seed=5, dtype=dtype)
    slots = torch.tensor([2, 40, 7])
    kernels.store_kv(product[:, 2:4], product[:, 4:6], paged.cache, slots)
    keys, values = _keys_and_values(paged.cache)
    assert torch.equal(keys[slots // 16, :, slots % 16], product[:, 2:4])
    assert torch.equal(values[slots // 16, :, slots % 16], product[:, 4:6])


@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_agree_in_every_bit(dtype: torch.dtype) -> None:
    paged = Paged.make(dtype, head_dim=40, lengths=[75, 130], query_lens=[5, 70])
    paged.sinks = randn(6)
    results = []
    for isa in SAME_BITS:
        kernels.use_isa(isa)
        paged.distance_bias = None
        capped = paged.attend(window=50, softcap=20.0)
        paged.distance_bias = randn(6, 100, seed=7)
        results.append(torch.cat([capped, paged.attend(window=110)]))
    for isa, result in zip(SAME_BITS, results, strict=True):
        assert torch.equal(result, results[-1]), isa


@pytest.mark.skipif("amx_bf16" not in ISAS, reason="this processor has no AMX")
def test_amx_keeps_more_than_bfloat16_probabilities() -> None:
    paged = Paged.make(torch.bfloat16, lengths=[300], query_lens=[200], head_dim=40)
    exact = paged.expected(window=200, softcap=20.0).to(torch.bfloat16)
    right = {}
    for isa in ("amx_bf16", "avx512"):
        kernels.use_isa(isa)
        right[isa] = float((paged.attend(window=200, softcap=20.0) == exact).float().mean())
    assert right["amx_bf16"] > 0.97
    assert right["avx512"] < 0.8, "the others round a probability to bfloat16"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_query_changes_no_other_row(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    paged = Paged.make(dtype, lengths=[150, 40], query_lens=[150, 3])
    clean = paged.attend()
    paged.query[70, 1] = float("nan")
    out = paged.attend()
    assert out[70, 1].isnan().all()
    out[70, 1] = clean[70, 1]
    assert torch.equal(out, clean)


def test_store_writes_its_slots_and_nothing_else() -> None:
    for dtype in DTYPES:
        cache = replace(_cache(4, 3, 5, 8, 16, dtype))
        cache.memory.zero_()
        key, value = randn(3, 3, 8, dtype=dtype), randn(3, 3, 16, seed=1, dtype=dtype)
        kernels.store_kv(key, value, cache, torch.tensor([13, -1, 0]))
        written = cache.memory.clone()
        cache.memory.zero_()
        keys, values = _keys_and_values(cache)
        for row, block, offset in ((0, 2, 3), (2, 0, 0)):
            keys[block, :, offset], values[block, :, offset] = key[row], value[row]
        assert torch.equal(cache.memory, written)


# Refused arguments


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("block_tables", {"tables": torch.full((1, 3), 99, dtype=torch.int32)}),
        ("block_tables", {"tables": torch.full((1, 3), -1, dtype=torch.int32)}),
        ("block_tables", {"tables": torch.zeros(2, 3, dtype=torch.int32)}),
        ("block_tables", {"tables": torch.zeros(1, 3, dtype=torch.int64)}),
        ("seq_lens", {"seq_lens": torch.tensor([49], dtype=torch.int32)}),
        ("seq_lens", {"seq_lens": torch.tensor([3], dtype=torch.int32)}),
        ("query_start", {"query_start": torch.tensor([1, 4], dtype=torch.int32)}),
        ("query_start", {"query_start": torch.tensor([0, 5], dtype=torch.int32)}),
        ("query_start", {"query_start": torch.tensor([0, -1], dtype=torch.int32)}),
        ("query_start", {"query_start": torch.tensor([0], dtype=torch.int32)}),
        ("query", {"query": torch.zeros(4, 5, 32)}),
        ("query", {"query": torch.zeros(4, 6, 32, dtype=torch.bfloat16)}),
        ("query", {"query": torch.zeros(4, 6, 16)}),
        ("query", {"query": torch.zeros(4, 32, 6).transpose(1, 2)}),
        ("sinks", {"sinks": torch.zeros(5)}),
        ("cache", {"cache": replace(_cache(4, 2, 16, 32, 32, torch.float32), block_stride=100)}),
        ("cache", {"cache": replace(_cache(4, 2, 16, 32, 32, torch.float32), num_blocks=5)}),
        ("cache", {"cache": replace(_cache(4, 2, 16, 32, 32, torch.float32), key_offset=-1)}),
        ("cache", {"cache": replace(_cache(4, 2, 16, 32, 32, torch.float32), num_kv_heads=0)}),
        ("key_dim", {"cache": _cache(4, 2, 16, 12, 32, torch.float32), "query": torch.zeros(4, 6, 12)}),
        ("value_dim", {"cache": _cache(4, 2, 16, 32, 712, torch.float32)}),
    ],
)
def test_attention_refuses_arguments_that_reach_outside_the_cache(argument: str, change: dict[str, object]) -> None:
    paged = Paged.make(torch.float32, lengths=[20], query_lens=[4])
    for name, value in change.items():
        setattr(paged, name, value)
    with pytest.raises(KernelArgumentError) as error:
        paged.attend()
    assert error.value.argument == argument


def test_attention_refuses_invalid_numbers() -> None:
    paged = Paged.make(torch.float32, lengths=[20], query_lens=[4])
    for window, softcap in ((0, None), (-1, None), (None, 0.0), (None, float("nan"))):
        with pytest.raises(KernelArgumentError):
            paged.attend(window, softcap)


def test_a_slot_outside_the_cache_is_refused_before_anything_is_written() -> None:
    cache = _cache(4, 3, 5, 8, 8, torch.float32)
    key = randn(2, 3, 8)
    with pytest.raises(KernelArgumentError) as error:
        kernels.store_kv(key, key, cache, torch.tensor([3, 20]))
    assert error.value.argument == "slots"
    assert cache.memory.isnan().all()

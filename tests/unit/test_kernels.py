"""The kernels against float64, and the promise that a row's bits depend on the row alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.runner import kernels
from baton.engine.runner.kernels import KernelArgumentError, KernelsUnavailable

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

DTYPES = [torch.float32, torch.bfloat16]
ISAS = kernels.available().isas
SAME_BITS = [isa for isa in ISAS if isa != "amx_bf16"]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.2e-3}


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    kernels.use_isa(None)


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


# Products


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 64, 64), (3, 1, 1), (13, 70, 33), (29, 130, 96), (2, 17, 501), (70, 40, 129)]
)
def test_linear_is_the_product(isa: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    kernels.use_isa(isa)
    x, weight, bias = _randn(m, k, dtype=dtype), _randn(n, k, seed=1, dtype=dtype), _randn(n, seed=2, dtype=dtype)
    packed = kernels.pack(weight)
    expected = x.double() @ weight.double().T
    for added in (None, bias):
        out = kernels.linear(x, packed, added)
        assert out.dtype == dtype
        assert _relative_error(out, expected if added is None else expected + added.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=8, deadline=None)
@given(n=st.integers(1, 200), k=st.integers(1, 300), m=st.integers(1, 40), data=st.data())
def test_a_row_of_linear_does_not_depend_on_its_batch(
    isa: str, dtype: torch.dtype, n: int, k: int, m: int, data: st.DataObject
) -> None:
    kernels.use_isa(isa)
    x, weight, bias = _randn(m, k, dtype=dtype), _randn(n, k, seed=1, dtype=dtype), _randn(n, seed=2, dtype=dtype)
    packed = kernels.pack(weight)
    whole = kernels.linear(x, packed, bias)
    start = data.draw(st.integers(0, m - 1))
    end = data.draw(st.integers(start + 1, m))
    assert torch.equal(kernels.linear(x[start:end].clone(), packed, bias), whole[start:end])
    row = data.draw(st.integers(0, m - 1))
    assert torch.equal(kernels.linear(x[row : row + 1].clone(), packed, bias), whole[row : row + 1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_count_gives_the_rows_of_the_largest(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    x, packed = _randn(70, 160, dtype=dtype), kernels.pack(_randn(70, 160, seed=1, dtype=dtype))
    whole = kernels.linear(x, packed)
    for rows in range(1, 40):
        assert torch.equal(kernels.linear(x[70 - rows :], packed), whole[70 - rows :]), rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 900, 640), (300, 64, 640), (37, 333, 129)])
def test_threads_do_not_change_a_product(isa: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    kernels.use_isa(isa)
    x, packed = _randn(m, k, dtype=dtype), kernels.pack(_randn(n, k, seed=1, dtype=dtype))
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(kernels.linear(x, packed))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_agree_in_every_bit(dtype: torch.dtype) -> None:
    x, packed = _randn(20, 331, dtype=dtype), kernels.pack(_randn(70, 331, seed=1, dtype=dtype))
    paged = Paged.make(dtype, head_dim=40, lengths=[75, 130], query_lens=[5, 70])
    products, attentions = [], []
    for isa in SAME_BITS:
        kernels.use_isa(isa)
        products.append(kernels.linear(x, packed))
        attentions.append(paged.attend(window=50, softcap=20.0))
    for isa, product, attention in zip(SAME_BITS, products, attentions, strict=True):
        assert torch.equal(product, products[-1]), isa
        assert torch.equal(attention, attentions[-1]), isa


@pytest.mark.skipif("amx_bf16" not in ISAS, reason="this processor has no AMX")
def test_amx_attention_keeps_more_than_bfloat16_probabilities() -> None:
    paged = Paged.make(torch.bfloat16, lengths=[300], query_lens=[200], head_dim=40)
    out = []
    for isa in ("amx_bf16", "avx512"):
        kernels.use_isa(isa)
        out.append(paged.attend(window=200, softcap=20.0))
    assert (out[0] == out[1]).float().mean() > 0.97


def test_the_fingerprint_tells_orders_of_summation_apart() -> None:
    numerics = {}
    for isa in ISAS:
        kernels.use_isa(isa)
        numerics[isa] = kernels.available().numerics
    assert len({numerics[isa] for isa in SAME_BITS}) == 1
    assert len(set(numerics.values())) == (2 if "amx_bf16" in ISAS else 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0)])
def test_empty_products(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    bias = _randn(n, dtype=dtype)
    out = kernels.linear(_randn(m, k, dtype=dtype), kernels.pack(_randn(n, k, dtype=dtype)), bias)
    assert torch.equal(out, bias.expand(m, n))


def test_not_a_number_stays_in_its_row() -> None:
    for dtype in DTYPES:
        x = _randn(20, 64, dtype=dtype)
        packed = kernels.pack(_randn(70, 64, seed=1, dtype=dtype))
        clean = kernels.linear(x, packed)
        x[7, 3] = float("nan")
        out = kernels.linear(x, packed)
        assert out[7].isnan().all()
        assert torch.equal(torch.cat([out[:7], out[8:]]), torch.cat([clean[:7], clean[8:]]))


def test_subnormal_numbers_are_left_to_the_caller() -> None:
    """The kernels flush them; nobody else's arithmetic may change."""
    tiny = torch.full((1, 1), 1e-40)
    assert not kernels.linear(tiny, kernels.pack(torch.ones(1, 1))).any()
    assert (tiny * 1.0).all()


# Attention


@dataclass
class Paged:
    """Requests whose keys and values lie scattered over a cache full of NaN."""

    cache: torch.Tensor
    tables: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    layer: int = 1

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
        block_size: int = 16,
        placement: int = 0,
        seed: int = 0,
    ) -> Paged:
        """Request i's tensors depend on seed + i; placement chooses the blocks."""
        width = max(-(-length // block_size) for length in lengths) + 1
        blocks = width * len(lengths) + 3
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(placement))
        tables = order[: width * len(lengths)].view(len(lengths), width).to(torch.int32)
        cache = torch.full((blocks, 3, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
        queries, keys, values = [], [], []
        for i, length in enumerate(lengths):
            key = _randn(length, kv_heads, head_dim, seed=10 * (seed + i), dtype=dtype)
            value = _randn(length, kv_heads, head_dim, seed=10 * (seed + i) + 1, dtype=dtype)
            position = torch.arange(length)
            slots = tables[i, position // block_size].long() * block_size + position % block_size
            kernels.store_kv(key, value, cache, cls.layer, slots)
            queries.append(
                _randn(length, heads, head_dim, seed=10 * (seed + i) + 2, dtype=dtype)[length - query_lens[i] :]
            )
            keys.append(key)
            values.append(value)
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        return cls(cache, tables, starts, torch.tensor(lengths, dtype=torch.int32), torch.cat(queries), keys, values)

    def attend(self, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        return kernels.paged_attention(
            self.query, self.cache, self.layer, self.query_start, self.seq_lens, self.tables, 0.3, window, softcap
        )

    def expected(self, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        out = []
        for i, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            query = self.query[int(self.query_start[i]) : int(self.query_start[i + 1])].double()
            group = query.shape[1] // key.shape[1]
            scores = torch.einsum("qhd,khd->hqk", query, key.double().repeat_interleave(group, 1)) * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            at = torch.arange(len(key) - len(query), len(key))[:, None]
            key_at = torch.arange(len(key))[None]
            seen = key_at <= at
            if window is not None:
                seen &= key_at > at - window
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, value.double().repeat_interleave(group, 1)))
        return torch.cat(out)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (20, None), (64, 5.0), (1000, 30.0)])
def test_attention_is_softmax_attention(
    isa: str, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    kernels.use_isa(isa)
    paged = Paged.make(dtype, lengths=[1, 64, 90, 200], query_lens=[1, 64, 1, 77], head_dim=40)
    assert _relative_error(paged.attend(window, softcap), paged.expected(window, softcap)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (14, 2), (71, 1), (5, 5)])
def test_attention_of_every_head_shape(dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int) -> None:
    paged = Paged.make(
        dtype, lengths=[70, 33], query_lens=[9, 1], heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=5
    )
    assert _relative_error(paged.attend(), paged.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6, deadline=None)
@given(
    length=st.integers(1, 210),
    split=st.lists(st.integers(1, 80), max_size=4),
    window=st.none() | st.integers(1, 150),
    block_size=st.sampled_from([1, 7, 16, 32, 100]),
    group=st.sampled_from([1, 3, 7]),
    placement=st.integers(0, 100),
)
def test_a_row_of_attention_does_not_depend_on_chunks_mates_or_blocks(
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_attention(dtype: torch.dtype) -> None:
    paged = Paged.make(dtype, lengths=[300, 17, 130], query_lens=[200, 1, 5])
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(paged.attend())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_later_tokens_that_are_not_numbers_reach_nobody_before_them(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    paged = Paged.make(dtype, lengths=[150], query_lens=[150])
    clean = paged.attend(window=70)
    block, offset = int(paged.tables[0, 100 // 16]), 100 % 16
    paged.cache[block, paged.layer, :, :, offset] = float("nan")
    out = paged.attend(window=70)
    assert torch.equal(out[:100], clean[:100])
    assert out[100:].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_behind_the_window_reach_nobody(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    paged = Paged.make(dtype, lengths=[150], query_lens=[150])
    clean = paged.attend(window=20)
    block, offset = int(paged.tables[0, 100 // 16]), 100 % 16
    paged.cache[block, paged.layer, :, :, offset] = float("inf")
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


def test_store_writes_its_slots_and_nothing_else() -> None:
    for dtype in DTYPES:
        cache = torch.zeros(4, 2, 2, 3, 5, 8, dtype=dtype)
        key, value = _randn(3, 3, 8, dtype=dtype), _randn(3, 3, 8, seed=1, dtype=dtype)
        kernels.store_kv(key, value, cache, 1, torch.tensor([13, -1, 0]))
        expected = torch.zeros_like(cache)
        for row, block, offset in ((0, 2, 3), (2, 0, 0)):
            expected[block, 1, 0, :, offset], expected[block, 1, 1, :, offset] = key[row], value[row]
        assert torch.equal(cache, expected)


# What is refused


def test_products_refuse_what_does_not_fit() -> None:
    packed = kernels.pack(_randn(6, 4))
    for x, bias, argument in (
        (_randn(2, 5), None, "x"),
        (_randn(2, 4, dtype=torch.bfloat16), None, "x"),
        (_randn(4, 2).T, None, "x"),
        (_randn(4), None, "x"),
        (_randn(2, 4), _randn(5), "bias"),
        (_randn(2, 4), _randn(6, dtype=torch.bfloat16), "bias"),
    ):
        with pytest.raises(KernelArgumentError) as error:
            kernels.linear(x, packed, bias)
        assert error.value.argument == argument
    with pytest.raises(KernelArgumentError):
        kernels.pack(_randn(2, 2).double())


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
        ("layer", {"layer": 3}),
        ("query", {"query": torch.zeros(4, 5, 32)}),
        ("query", {"query": torch.zeros(4, 6, 32, dtype=torch.bfloat16)}),
        ("kv_cache", {"query": torch.zeros(4, 6, 16)}),
        ("kv_cache", {"cache": torch.zeros(4, 3, 2, 2, 32, 16).transpose(4, 5)}),
        ("head_dim", {"cache": torch.zeros(4, 3, 2, 2, 16, 12), "query": torch.zeros(4, 6, 12)}),
        ("head_dim", {"cache": torch.zeros(4, 3, 2, 2, 16, 264), "query": torch.zeros(4, 6, 264)}),
    ],
)
def test_attention_refuses_what_would_leave_the_cache(argument: str, change: dict[str, object]) -> None:
    paged = Paged.make(torch.float32, lengths=[20], query_lens=[4])
    for name, value in change.items():
        setattr(paged, name, value)
    with pytest.raises(KernelArgumentError) as error:
        paged.attend()
    assert error.value.argument == argument


def test_attention_refuses_numbers_without_sense() -> None:
    paged = Paged.make(torch.float32, lengths=[20], query_lens=[4])
    for window, softcap in ((0, None), (-1, None), (None, 0.0), (None, float("nan"))):
        with pytest.raises(KernelArgumentError):
            paged.attend(window, softcap)


def test_a_slot_outside_the_cache_is_refused_before_anything_is_written() -> None:
    cache = torch.zeros(4, 2, 2, 3, 5, 8)
    key = _randn(2, 3, 8)
    with pytest.raises(KernelArgumentError) as error:
        kernels.store_kv(key, key, cache, 0, torch.tensor([3, 20]))
    assert error.value.argument == "slots"
    assert not cache.any()


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(KernelsUnavailable, match="it has"):
        kernels.use_isa("sse9")

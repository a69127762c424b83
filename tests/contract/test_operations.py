"""Every implementation of the operations equals float64 within the rounding of its dtype, row by row in fixed bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.cpu.kernels import KernelArgumentError
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cpu.kernels.rows import Xielu
from baton.runner.backends.paged_cache import CacheView
from baton.runner.backends.torch_operations import activate
from baton.runner.backends.torch_states import nearest_root
from tests.support.kernel_inputs import randn
from tests.support.pairs import all_pairs

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 6e-3}
LENGTHS, QUERIES, SIZE = (1, 40, 90), (1, 5, 33), 16


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((actual.double() - expected).norm() / expected.norm()) < TOLERANCE[actual.dtype]


def test_products_equal_those_in_float64(operations: Any, dtype: torch.dtype) -> None:
    x, bias = randn(13, 96, seed=0, dtype=dtype), randn(70, seed=1, dtype=dtype)
    gate, up = (randn(70, 96, seed=seed, dtype=dtype) for seed in (2, 3))
    expected = x.double() @ gate.double().T
    assert_near(operations.linear(x, operations.pack(gate)), expected)
    assert_near(operations.linear(x, operations.pack(gate), bias), expected + bias.double())
    both = operations.pack_gated(gate, up)
    for activation in get_args(Activation):
        gated = activate(expected, activation) * (x.double() @ up.double().T)
        assert_near(operations.gated_linear(x, both, activation=activation), gated)


def test_a_float32_product_is_as_near_whatever_the_dtype_of_its_operands(operations: Any, dtype: torch.dtype) -> None:
    """Its error is smaller by a thousand than bfloat16's rounding."""
    x, weight, bias = (randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(((13, 96), (70, 96), (70,))))
    expected = x.double() @ weight.double().T
    packed = operations.pack(weight)
    for added in (None, bias):
        out = operations.linear(x, packed, added, out_dtype=torch.float32)
        assert out.dtype == torch.float32
        exact = expected if added is None else expected + added.double()
        assert float((out.double() - exact).norm() / exact.norm()) < 3e-6
        alone = operations.linear(x[5:6].clone(), packed, added, out_dtype=torch.float32)
        assert torch.equal(alone, out[5:6]), "a row does not depend on the other rows"


def test_products_of_heads_have_the_bits_of_each_head_alone(operations: Any, dtype: torch.dtype) -> None:
    x, weights = randn(13, 3, 50, seed=0, dtype=dtype), randn(3, 24, 40, seed=1, dtype=dtype)
    packed = operations.pack_heads(list(weights))
    wide = torch.full((13, 3, 40), 7.0, dtype=dtype)
    operations.linear_of_heads(x[..., 10:], packed, wide[..., 8:32])
    for head in range(3):
        alone = operations.linear(x[:, head, 10:].contiguous(), operations.pack(weights[head]))
        assert torch.equal(wide[:, head, 8:32], alone)
        assert torch.equal(operations.linear(x[:, head, 10:].contiguous(), packed[head]), alone)
    assert torch.equal(wide[..., :8], torch.full((13, 3, 8), 7.0, dtype=dtype))
    assert torch.equal(wide[..., 32:], torch.full((13, 3, 8), 7.0, dtype=dtype))
    last = torch.empty(2, 1, 24, dtype=dtype)
    operations.linear_of_heads(x[5:7, 2:, 10:], packed[2:], last)
    assert torch.equal(last[:, 0], wide[5:7, 2, 8:32])


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("has_wide_angles", [False, True])
def test_rotations_equal_those_in_float64(
    operations: Any, dtype: torch.dtype, has_wide_angles: bool, in_pairs: bool
) -> None:
    half = randn(13, 21, seed=2, dtype=torch.float32)
    angle_dtype = torch.float32 if has_wide_angles else dtype
    cos, sin = (torch.cat([part, part], dim=1).to(angle_dtype) for part in (half.cos(), half.sin()))
    turned = randn(13, 2, 50, seed=0, dtype=dtype)
    rows = turned.double()[..., :42]
    first, second = (rows[..., ::2], rows[..., 1::2]) if in_pairs else rows.chunk(2, dim=-1)
    c, s = cos.double()[:, None, :21], sin.double()[:, None, :21]
    parts = (first * c - second * s, second * c + first * s)
    expected = torch.stack(parts, dim=-1).flatten(2) if in_pairs else torch.cat(parts, dim=-1)
    alone, before = turned[4:5].clone(), turned.clone()
    operations.rotate(turned, cos, sin, in_pairs=in_pairs)
    assert_near(turned[..., :42], expected)
    assert torch.equal(turned[..., 42:], before[..., 42:])
    operations.rotate(alone, cos[4:5], sin[4:5], in_pairs=in_pairs)
    assert torch.equal(alone, turned[4:5]), "a row does not depend on the other rows"


def test_norms_equal_those_in_float64(operations: Any, dtype: torch.dtype) -> None:
    x, weight = randn(13, 96, seed=0, dtype=dtype), randn(96, seed=1, dtype=dtype)
    wide = x.double()
    normal = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_near(operations.rms_norm(x, weight, 1e-5), normal * weight.double())
    assert_near(operations.rms_norm(x, weight, 1e-5, plus_one=True), normal * (1 + weight.double()))


def test_norms_around_the_mean_equal_those_in_float64(operations: Any, dtype: torch.dtype) -> None:
    """The norm is of rows, or of heads with weights of their own."""
    x, bias = (randn(13, 4, 24, seed=0) + 3).to(dtype), randn(24, seed=2, dtype=dtype)
    for weight in (randn(24, seed=1, dtype=dtype), randn(4, 24, seed=1, dtype=dtype)):
        around = x.double() - x.double().mean(-1, keepdim=True)
        normal = around / (around.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        assert_near(operations.layer_norm(x, weight, None, 1e-5), normal)
        out = operations.layer_norm(x, weight, bias, 1e-5)
        assert_near(out, normal + bias.double())
        assert torch.equal(operations.layer_norm(x[4:5], weight, bias, 1e-5), out[4:5])


def test_activations_equal_those_in_float64(operations: Any, dtype: torch.dtype) -> None:
    x = randn(13, 50, seed=0, dtype=dtype)[:, 3:40]
    for activation in (*get_args(Activation), Xielu(0.7, 0.9, 0.4, -1e-6), "tanh"):
        out = operations.activate(x, activation)
        assert_near(out, activate(x.double(), activation))
        assert torch.equal(operations.activate(x[4:5], activation), out[4:5])


def test_streams_equal_those_in_float64(operations: Any, dtype: torch.dtype) -> None:
    x, result = randn(13, 4 * 21, seed=0, dtype=dtype), randn(13, 21, seed=1, dtype=dtype)
    mixing, correcting = randn(13, 16, seed=2, dtype=dtype), randn(13, 4, seed=3, dtype=dtype)
    streams = x.double().view(13, 4, 21)
    mixed = operations.mix_streams(x, mixing)
    assert_near(mixed, (streams + mixing.double().view(13, 4, 4) @ streams).flatten(1))
    assert torch.equal(operations.mix_streams(x[4:5], mixing[4:5]), mixed[4:5])
    corrected = operations.correct_streams(x, result, correcting, 2)
    difference = (result.double() - streams[:, 2])[:, None]
    assert_near(corrected, (streams + difference * (1 + correcting.double())[:, :, None]).flatten(1))
    assert torch.equal(operations.correct_streams(x[4:5], result[4:5], correcting[4:5], 2), corrected[4:5])
    mean = operations.mean_of_streams(x, 4)
    assert_near(mean, streams.mean(1))
    assert torch.equal(operations.mean_of_streams(x[4:5], 4), mean[4:5])


def test_rows_are_as_large_as_others(operations: Any, dtype: torch.dtype) -> None:
    """The last row is so small that it would be divided by nearly nothing."""
    x, like = randn(13, 70, seed=0, dtype=dtype), randn(13, 70, seed=1, dtype=dtype)
    x[-1] *= 1e-4
    means = operations.row_means(x)
    assert means.shape == (13, 1)
    assert_near(operations.row_means(x.abs()), x.double().abs().mean(-1, keepdim=True))
    sizes = [rows.double().square().mean(-1, keepdim=True) for rows in (like, x)]
    out = operations.resize(x, like, 1e-5)
    assert_near(out, x.double() * sizes[0].sqrt() / sizes[1].clamp(min=1e-5).sqrt())
    # Rounded steps of the operation are those of torch, with these means.
    own = nearest_root(operations.row_means(x**2).clamp(min=1e-5))
    assert torch.equal(out, x * nearest_root(operations.row_means(like**2)) / own)
    assert torch.equal(operations.resize(x[4:5], like[4:5], 1e-5), out[4:5])
    assert torch.equal(operations.row_means(x[4:5]), means[4:5])


def test_gates_pass_what_is_far_above_their_mean(operations: Any, dtype: torch.dtype) -> None:
    x = (randn(13, 2 * 96, seed=0) + 0.5).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    kinds: tuple[tuple[float, Activation], ...] = ((1.2, "gelu_tanh"), (0.0, "silu"))
    for deviations, activation in kinds:
        cutoff = gate.mean(-1, keepdim=True) + deviations * gate.std(-1, keepdim=True, unbiased=False)
        out = operations.sparse_gate(x, deviations, activation)
        assert_near(out, activate((gate - cutoff).relu(), activation) * up)
        assert torch.equal(operations.sparse_gate(x[4:5], deviations, activation), out[4:5])


@dataclass(frozen=True)
class Paged:
    """Sequences of random keys and values, in shuffled blocks of a cache, and queries for their last positions."""

    cache: CacheView
    tables: torch.Tensor
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def make(
        cls,
        operations: Any,
        dtype: torch.dtype,
        *,
        heads: tuple[int, int] = (6, 2),
        widths: tuple[int, int] = (16, 16),
        lengths: Sequence[int] = LENGTHS,
        counts: Sequence[int] = QUERIES,
        values_in_keys: bool = False,
    ) -> Paged:
        """`heads`: of queries and of keys; `widths`: of keys and of values; `counts`: of queries."""
        (num_heads, kv_heads), (key_dim, value_dim) = heads, widths
        width = -(-max(lengths) // SIZE)
        half, stride = kv_heads * SIZE * key_dim, kv_heads * SIZE * (key_dim + value_dim)
        if values_in_keys:
            half, stride = 0, half
        blocks = 1 + width * len(lengths)
        memory = torch.zeros(blocks * stride, dtype=dtype)
        cache = CacheView(
            memory, blocks, stride, 0, half, kv_heads, SIZE, key_dim, value_dim, values_in_keys=values_in_keys
        )
        order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
        paged = cls(cache, order.view(len(lengths), width).to(torch.int32), [], [], [])
        for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            keys, values = (randn(length, kv_heads, d, seed=10 * index + d, dtype=dtype) for d in (key_dim, value_dim))
            position = torch.arange(length)
            slots = paged.tables[index, position // SIZE].long() * SIZE + position % SIZE
            if values_in_keys:
                values = keys[..., :value_dim]
            operations.store_kv(keys, None if values_in_keys else values, cache, slots)
            paged.queries.append(randn(count, num_heads, key_dim, seed=10 * index + 1, dtype=dtype))
            paged.keys.append(keys)
            paged.values.append(values)
        return paged

    def attend(self, operations: Any, *chunks: tuple[int, int, int], **features: Any) -> torch.Tensor:
        """Attention of chunks (sequence, first position, position behind the last) in one call; without any, of all."""
        chunks = chunks or tuple(
            (index, len(keys) - len(query), len(keys))
            for index, (keys, query) in enumerate(zip(self.keys, self.queries, strict=True))
        )
        rows = []
        for index, first, behind in chunks:
            start = len(self.keys[index]) - len(self.queries[index])
            rows.append(self.queries[index][first - start : behind - start])
        starts = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
        lengths = torch.tensor([behind for *_, behind in chunks], dtype=torch.int32)
        tables = self.tables[[index for index, *_ in chunks]]
        how = AttentionFeatures(0.2, **features)
        out: torch.Tensor = operations.paged_attention(
            AttentionCall(torch.cat(rows), self.cache, starts, lengths, tables, how)
        )
        return out

    def expected(self, **features: Any) -> torch.Tensor:
        """What `attend` computes of all queries, in float64."""
        parts = zip(self.queries, self.keys, self.values, strict=True)
        return torch.cat([attend(*part, **features) for part in parts])


@pytest.mark.parametrize("widths", [(16, 16), (24, 16), (256, 256)])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(None, None, False), (20, None, False), (20, 5.0, False), (None, None, True)]
)
def test_attention_equals_attention_in_float64(
    operations: Any,
    dtype: torch.dtype,
    widths: tuple[int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
) -> None:
    paged = Paged.make(operations, dtype, widths=widths)
    features = {"window": window, "softcap": softcap, "sinks": randn(6, seed=9, dtype=dtype) if sinks else None}
    assert_near(paged.attend(operations, **features), paged.expected(**features))


@pytest.mark.parametrize("heads", [(6, 2), (40, 1)])
@pytest.mark.parametrize("widths", [(40, 32), (576, 512)])
def test_values_may_be_the_first_numbers_of_their_keys(
    operations: Any, dtype: torch.dtype, heads: tuple[int, int], widths: tuple[int, int]
) -> None:
    paged = Paged.make(operations, dtype, heads=heads, widths=widths, values_in_keys=True)
    assert_near(paged.attend(operations), paged.expected())


@all_pairs(
    {
        "heads": [(6, 2), (4, 4), (5, 1)],
        "distances": [1, 7, 64, 300],
        "window, sinks": [(None, False), (20, False), (70, True)],
    }
)
def test_a_head_adds_its_bias_of_the_distance_to_each_score(
    operations: Any, dtype: torch.dtype, heads: tuple[int, int], distances: int, window: int | None, sinks: bool
) -> None:
    paged = Paged.make(operations, dtype, heads=heads)
    features = {
        "window": window,
        "sinks": randn(heads[0], seed=9) if sinks else None,
        "distance_bias": 2 * randn(heads[0], distances, seed=8),
    }
    assert_near(paged.attend(operations, **features), paged.expected(**features))


@pytest.mark.parametrize("distances", [10, 300])
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_with_biases_has_the_same_bits_in_every_chunk_and_batch(
    operations: Any, dtype: torch.dtype, distances: int, window: int | None
) -> None:
    paged = Paged.make(operations, dtype, lengths=(150, 90), counts=(150, 90))
    features = {"window": window, "distance_bias": 2 * randn(6, distances, seed=8)}
    whole = paged.attend(operations, (0, 0, 150), **features)
    other = paged.attend(operations, (1, 0, 90), **features)
    for first, behind in ((0, 1), (0, 70), (70, 71), (64, 140), (149, 150)):
        assert torch.equal(paged.attend(operations, (0, first, behind), **features), whole[first:behind])
    mixed = paged.attend(operations, (1, 80, 90), (0, 100, 150), (1, 0, 3), **features)
    assert torch.equal(mixed, torch.cat([other[80:], whole[100:], other[:3]]))
    # Decode steps of several requests that begin with the same blocks.
    positions = (149, 130, 149, 66, 127)
    decoded = paged.attend(operations, *((0, position, position + 1) for position in positions), **features)
    assert torch.equal(decoded, whole[list(positions)])


@pytest.mark.parametrize(
    ("bias", "features"),
    [
        (torch.zeros(5, 8), {}),
        (torch.zeros(6), {}),
        (torch.zeros(6, 0), {}),
        (torch.zeros(6, 8, dtype=torch.bfloat16), {}),
        (torch.zeros(6, 8, dtype=torch.float64), {}),
        (torch.zeros(8, 6).T, {}),
        (torch.zeros(6, 8, device="meta"), {}),
        (torch.zeros(6, 8), {"softcap": 5.0}),
        (torch.zeros(6, 8), {"ahead": 3}),
    ],
)
def test_biases_that_do_not_fit_are_refused(operations: Any, bias: torch.Tensor, features: dict[str, Any]) -> None:
    paged = Paged.make(operations, torch.float32)
    with pytest.raises(KernelArgumentError) as error:
        paged.attend(operations, distance_bias=bias, **features)
    assert error.value.argument == "distance_bias"


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    distance_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention in float64 of the last rows of a sequence."""
    group, length = query.shape[1] // keys.shape[1], len(keys)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys.double().repeat_interleave(group, 1)) * 0.2
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    at, key_at = torch.arange(length - len(query), length)[:, None], torch.arange(length)[None]
    if distance_bias is not None:
        distances = (at - key_at).clamp(0, distance_bias.shape[1] - 1)
        scores = scores + distance_bias.double()[:, distances]
    seen = (key_at <= at) & (key_at > at - (window or length))
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(query), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], values.double().repeat_interleave(group, 1))

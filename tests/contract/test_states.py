"""All implementations of convolutions and recurrences equal transformers', and no bit depends on chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from baton.runner.backends.cpu.kernels import KernelArgumentError
from tests.support.kernel_inputs import DTYPES, randn, relative_error
from tests.support.pairs import all_pairs
from tests.support.stateful_rows import Chunk, Convolved, Recurred, StatefulRows

LENGTHS = (23, 9, 30)
CUTS: list[list[Chunk]] = [
    [(0, 0, 1), (2, 0, 8)],
    [(0, 1, 7)],
    [(1, 0, 9), (0, 7, 16), (2, 8, 9)],
    [(2, 9, 25), (0, 16, 17)],
    [(0, 17, 23), (2, 25, 30)],
]
"""Steps that compute all rows of sequences of these lengths, and end at, before and behind ends of stripes of 8."""


def convolved(dtype: torch.dtype = torch.float32, **how: Any) -> Convolved:
    return Convolved(**{"lengths": LENGTHS, "shape": (3, 37), "dtype": dtype, **how})


def recurred(dtype: torch.dtype = torch.float32, **how: Any) -> Recurred:
    return Recurred(**{"lengths": LENGTHS, "shape": (4, 20, 37), "groups": 2, "dtype": dtype, **how})


LAYERS: dict[str, Callable[..., StatefulRows]] = {
    "convolution": convolved,
    "long convolution": lambda dtype, **how: convolved(dtype, shape=(12, 16), **how),
    "delta rule": recurred,
    "recurrence with a skip": lambda dtype, **how: recurred(dtype, rule="factor", norm_eps=None, **how),
    "decay of each key": lambda dtype, **how: recurred(dtype, decay_per_key=True, shape=(2, 17, 1), **how),
    "rates of channels": lambda dtype, **how: recurred(
        dtype, **{"has_rates": True, "rule": "factor", "norm_eps": None, "groups": 1, "shape": (150, 5, 1), **how}
    ),
}


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(params=LAYERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return LAYERS[request.param]


# What is computed


@all_pairs({"taps": [2, 3, 4, 9], "activation": [None, "silu"], "has_bias": [True, False]})
def test_convolutions_equal_those_of_transformers(operations: Any, taps: int, activation: Any, has_bias: bool) -> None:
    layer = convolved(shape=(taps - 1, 37), activation=activation, has_bias=has_bias)
    out, call = layer.compute(operations, layer.whole), layer.call(layer.whole)
    for length, rows, found in zip(
        LENGTHS, call.rows.split_with_sizes(LENGTHS), out.split_with_sizes(LENGTHS), strict=True
    ):
        expected = causal_conv1d_fn(rows.T[None], call.weight, call.bias, activation)[0].T
        assert found.shape == (length, 37)
        assert relative_error(found, expected.double()) < 1e-6


@pytest.mark.parametrize("rule", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
def test_the_delta_rule_equals_that_of_transformers(operations: Any, rule: Any) -> None:
    layer = recurred()
    out, call = layer.compute(operations, layer.whole), layer.call(layer.whole)
    assert call.beta is not None
    parts = (call.query, call.key, call.value, call.decay, call.beta, out)
    for index, own in enumerate(zip(*(part[:, None].split_with_sizes(LENGTHS) for part in parts), strict=True)):
        *inputs, found = (part.transpose(0, 1) for part in own)
        expected, state = rule(*inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
        assert relative_error(found, expected.double()) < 2e-6
        assert relative_error(layer.states(index)[-1], state[0].double()) < 2e-6


def test_a_recurrence_without_the_delta_rule_equals_the_scan_of_mamba2(operations: Any) -> None:
    layer = recurred(rule="factor", norm_eps=None)
    call = layer.call(layer.whole)
    a, dt = -torch.tensor([0.5, 1.0, 2.0, 3.0]), call.decay.abs() + 0.1
    out = operations.recur(replace(call, decay=a * dt, beta=dt, scale=1.0))
    parts = [part.split_with_sizes(LENGTHS) for part in (call.value, dt, call.key, call.query, out)]
    for index, (*inputs, found) in enumerate(zip(*parts, strict=True)):
        x_own, dt_own, b, c = (part[None] for part in inputs)
        expected, state = mamba2_chunk_scan(x_own, dt_own, a, b, c, 8, D=call.skip, return_final_states=True)
        assert relative_error(found, expected[0].double()) < 2e-6
        assert relative_error(layer.states(index)[-1], state[0].mT.double()) < 2e-6


def test_each_key_decays_by_its_own_factor(operations: Any) -> None:
    layer = recurred(decay_per_key=True)
    out, call = layer.compute(operations, layer.whole), layer.call(layer.whole)
    assert call.beta is not None
    for found, *parts in zip(
        *(
            part.double().split_with_sizes(LENGTHS)
            for part in (out, call.query, call.key, call.value, call.decay, call.beta)
        ),
        strict=True,
    ):
        state, expected = torch.zeros(layer.shape, dtype=torch.float64), []
        for q, k, v, decay, beta in zip(*parts, strict=True):
            q, k = ((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(2, 0) for x in (q, k))
            state = state * decay.exp()[:, :, None]
            v = beta[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
            state = state + torch.einsum("hk,hv->hkv", k, v)
            expected.append(torch.einsum("hk,hkv->hv", q, state) * 20**-0.5)
        assert relative_error(found, torch.stack(expected)) < 2e-6


def test_rows_in_bfloat16_are_rounded_once(operations: Any) -> None:
    for layer, wide in ((convolved(torch.bfloat16), convolved()), (recurred(torch.bfloat16), recurred())):
        call = layer.call(layer.whole)
        names = [name for name in ("rows", "query", "key", "value") if hasattr(call, name)]
        same = replace(call, **{name: getattr(call, name).float() for name in names}, state=wide.view)
        compute = operations.convolve if isinstance(layer, Convolved) else operations.recur
        out = layer.compute(operations, layer.whole)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, compute(replace(same, step=wide.step(wide.whole))).bfloat16())
        assert torch.equal(layer.view.memory.nan_to_num(), wide.view.memory.nan_to_num())


# Which bits there are


def test_chunks_and_batches_change_no_bit(operations: Any, dtype: torch.dtype, make: Callable[..., Any]) -> None:
    whole, cut = make(dtype), make(dtype, placement=1)
    expected = dict(enumerate(whole.compute(operations, whole.whole).split_with_sizes(LENGTHS)))
    for chunks in CUTS:
        out = cut.compute(operations, chunks)
        for (index, first, behind), found in zip(
            chunks, out.split_with_sizes([behind - first for _, first, behind in chunks]), strict=True
        ):
            assert torch.equal(found, expected[index][first:behind])
    for index in range(len(LENGTHS)):
        assert torch.equal(cut.states(index), whole.states(index))
    alone = make(dtype, lengths=LENGTHS[1:2], seed=1, block_size=3)
    assert torch.equal(alone.compute(operations, alone.whole), expected[1])


def test_a_sequence_goes_on_from_the_snapshot_at_a_stripes_end(
    operations: Any, dtype: torch.dtype, make: Callable[..., Any]
) -> None:
    layer = make(dtype)
    expected = layer.compute(operations, layer.whole)[:23]
    kept = layer.states(0)
    layer.tables[0, 0] = 0  # nobody needs the stripe's snapshot any more
    layer.view.memory.view(layer.view.num_blocks, -1)[layer.tables[0, 2].long()] = float("nan")
    assert torch.equal(layer.compute(operations, [(0, 16, 23)]), expected[16:])
    assert torch.equal(layer.states(0)[1:], kept[1:])


def test_no_snapshot_is_written_to_the_null_block(
    operations: Any, dtype: torch.dtype, make: Callable[..., Any]
) -> None:
    layer = make(dtype)
    expected = layer.compute(operations, layer.whole)
    kept = layer.states(0)
    layer.view.memory.fill_(float("nan"))
    layer.tables[0, :2] = 0
    assert torch.equal(layer.compute(operations, layer.whole), expected)
    assert torch.equal(layer.states(0)[2], kept[2])
    assert layer.view.memory.view(layer.view.num_blocks, -1)[0].isnan().all()


def test_drafts_leave_no_trace(operations: Any, dtype: torch.dtype, make: Callable[..., Any]) -> None:
    whole, drafted = make(dtype), make(dtype, placement=2)
    expected = whole.compute(operations, [(0, 0, 23)])
    for first, behind, drafts in ((0, 10, 3), (7, 19, 12), (7, 18, 2), (16, 20, 1), (19, 23, 0)):
        found = drafted.compute(operations, [(0, first, behind)], drafts=drafts)
        assert torch.equal(found, expected[first:behind])
    assert torch.equal(drafted.states(0), whole.states(0))


def test_rows_of_no_sequence_are_zero_and_change_nothing(
    operations: Any, dtype: torch.dtype, make: Callable[..., Any]
) -> None:
    plain, padded = make(dtype), make(dtype)
    chunks = [(0, 0, 5), (1, 0, 0), (2, 0, 9)]
    out = padded.compute(operations, chunks, padding=3)
    assert torch.equal(out[:14], plain.compute(operations, chunks))
    assert not out[14:].any()
    assert torch.equal(padded.view.memory.nan_to_num(), plain.view.memory.nan_to_num())
    assert not padded.compute(operations, [], padding=2).any()


def test_nothing_is_written_outside_of_the_states(operations: Any, make: Callable[..., Any]) -> None:
    layer = make(torch.float32)
    layer.compute(operations, layer.whole)
    blocks = layer.view.memory.view(layer.view.num_blocks, -1)
    for index in range(len(LENGTHS)):
        blocks[layer.tables[index].long(), 7:-3] = float("nan")
    assert blocks.isnan().all()


@pytest.mark.parametrize("cut", [16, 30])
def test_ranks_with_some_of_the_columns_keep_the_states_of_one_with_all(operations: Any, cut: int) -> None:
    # The ends of torch's vectorised loops have other bits in their activation: ranks have kernels alone.
    whole, parts = convolved(activation=None), convolved(activation=None)
    for chunks in CUTS:
        call = parts.call(chunks)
        out = []
        for columns in (slice(cut), slice(cut, 37)):
            width = len(range(37)[columns])
            offset = parts.view.offset + columns.indices(37)[0]
            view = replace(parts.view, offset=offset, shape=(3, width), row_stride=37)
            own = replace(call, rows=call.rows[:, columns], weight=call.weight[columns], state=view)
            out.append(operations.convolve(replace(own, bias=None if call.bias is None else call.bias[columns])))
        assert torch.equal(torch.cat(out, dim=1), whole.compute(operations, chunks))
    assert torch.equal(parts.view.memory.nan_to_num(), whole.view.memory.nan_to_num())


# What is refused


def test_blocks_and_lengths_that_do_not_fit_are_refused(operations: Any, make: Callable[..., Any]) -> None:
    layer = make(torch.float32)
    layer.compute(operations, [(0, 0, 9)])
    before, tables, call = layer.view.memory.clone(), layer.tables.clone(), layer.call([(0, 9, 23)])
    compute = operations.convolve if isinstance(layer, Convolved) else operations.recur

    def refused(argument: str, **change: Any) -> None:
        step = replace(call.step, **{name: torch.tensor(value, dtype=torch.int32) for name, value in change.items()})
        with pytest.raises(KernelArgumentError) as error:
            compute(replace(call, step=step))
        assert error.value.argument == argument
        assert torch.equal(layer.view.memory.nan_to_num(), before.nan_to_num())

    blocks = tables[0].tolist()
    refused("block_tables", block_tables=[[blocks[0], 0, *blocks[2:]]])
    refused("block_tables", block_tables=[[blocks[0], -1, *blocks[2:]]])
    refused("block_tables", block_tables=[[*blocks[:2], layer.view.num_blocks, 0]])
    refused("seq_lens", seq_lens=[13])
    refused("seq_lens", seq_lens=[33], kept_lens=[33])
    refused("query_start", query_start=[0, 15])
    refused("query_start", query_start=[1, 14])
    refused("query_start", query_start=[0, -1])


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("rows", {"rows": torch.zeros(3, 36)}),
        ("rows", {"rows": torch.zeros(3, 37, dtype=torch.float64)}),
        ("rows", {"rows": torch.zeros(37)}),
        ("weight", {"weight": torch.zeros(37, 4, dtype=torch.bfloat16)}),
        ("weight", {"weight": torch.zeros(4, 37).T}),
        ("weight", {"weight": torch.zeros(37, 1)}),
        ("state", {"weight": torch.zeros(37, 3)}),
        ("bias", {"bias": torch.zeros(36)}),
        ("bias", {"bias": torch.zeros(37, device="meta")}),
    ],
)
def test_convolutions_that_do_not_fit_are_refused(operations: Any, argument: str, change: dict[str, Any]) -> None:
    call = convolved().call([(0, 0, 3)])
    with pytest.raises(KernelArgumentError) as error:
        operations.convolve(replace(call, **change))
    assert error.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("query", {"query": torch.zeros(3, 3, 20)}),
        ("query", {"query": torch.zeros(3, 2, 19)}),
        ("query", {"query": torch.zeros(3, 2, 20, dtype=torch.float16)}),
        ("key", {"key": torch.zeros(3, 2, 20, dtype=torch.bfloat16)}),
        ("key", {"key": torch.zeros(2, 2, 20)}),
        ("value", {"value": torch.zeros(3, 4, 36)}),
        ("decay", {"decay": torch.zeros(3, 4, 21)}),
        ("decay", {"decay": torch.zeros(4, 3).T}),
        ("decay", {"decay": torch.zeros(3, 4, dtype=torch.bfloat16)}),
        ("beta", {"beta": torch.zeros(3, 1)}),
        ("beta", {"beta": torch.zeros(3, 4, device="meta")}),
        ("skip", {"skip": torch.zeros(2)}),
        ("scale", {"scale": float("inf")}),
        ("norm_eps", {"norm_eps": -1.0}),
    ],
)
def test_recurrences_that_do_not_fit_are_refused(operations: Any, argument: str, change: dict[str, Any]) -> None:
    call = recurred().call([(0, 0, 3)])
    with pytest.raises(KernelArgumentError) as error:
        operations.recur(replace(call, **change))
    assert error.value.argument == argument


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (4, 20, 36)},
        {"shape": (4, 20)},
        {"shape": (4, 20, 0)},
        {"block_stride": 100},
        {"offset": -1},
        {"num_blocks": 99},
        {"num_blocks": 0},
        {"block_size": 0},
        {"memory": torch.zeros(60000, dtype=torch.bfloat16)},
        {"row_stride": 740},
    ],
)
def test_states_that_reach_out_of_the_cache_are_refused(operations: Any, change: dict[str, Any]) -> None:
    call = recurred().call([(0, 0, 3)])
    with pytest.raises(KernelArgumentError) as error:
        operations.recur(replace(call, state=replace(call.state, **change)))
    assert error.value.argument == ("value" if change == {"shape": (4, 20, 36)} else "state")


def test_heads_of_more_than_512_are_refused(operations: Any) -> None:
    layer = recurred(lengths=(3,), shape=(2, 513, 4))
    with pytest.raises(KernelArgumentError, match="state"):
        layer.compute(operations, layer.whole)


# Gates


@pytest.mark.parametrize("function", ["softplus", "sigmoid"])
@pytest.mark.parametrize("given", [True, False])
def test_gates_equal_those_in_float64(operations: Any, dtype: torch.dtype, function: Any, given: bool) -> None:
    x = (30 * randn(13, 37)).to(dtype)
    bias, factor = (randn(37, seed=1), -randn(37, seed=2).exp()) if given else (None, None)
    limits, scale = ((0.25, 0.5), randn(37, seed=3).exp()) if given else ((-math.inf, math.inf), None)
    out = operations.gate(x, function, bias, factor, limits, scale)
    compute = torch.nn.functional.softplus if function == "softplus" else torch.sigmoid
    total = x.double() if bias is None or scale is None else (x.double() + bias) * scale
    expected = compute(total).clamp(*limits)
    expected = expected if factor is None else expected * factor.double()
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-12)
    for row in range(13):
        assert torch.equal(operations.gate(x[row : row + 1], function, bias, factor, limits, scale)[0], out[row])


@pytest.mark.parametrize(("activation", "gate_first"), [("silu", False), ("sigmoid", False), ("silu", True)])
def test_gated_norms_equal_those_in_float64(
    operations: Any, dtype: torch.dtype, activation: Any, gate_first: bool
) -> None:
    """Rows that are gated first have a weight for each head."""
    x, wide_gate = randn(13, 3, 37, dtype=dtype), 3 * randn(13, 7 + 111, seed=1, dtype=dtype)
    by = wide_gate[:, 7:].view(13, 3, 37)
    weight = randn(*((3, 37) if gate_first else (37,)), seed=2, dtype=dtype)
    out = operations.gated_rms_norm(x, by, weight, 1e-5, activation, gate_first=gate_first)
    wide, of_gate = x.double(), by.double().sigmoid()
    of_gate = of_gate * by.double() if activation == "silu" else of_gate
    wide = wide * of_gate if gate_first else wide
    normal = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    expected = normal if gate_first else normal * of_gate
    assert out.dtype == dtype
    assert relative_error(out, expected) < (1e-6 if dtype == torch.float32 else 2.5e-3)
    for row in range(13):
        few = x[row : row + 1], by[row : row + 1], weight
        alone = operations.gated_rms_norm(*few, 1e-5, activation, gate_first=gate_first)
        assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize(("activation", "heads"), [(None, 37), ("sigmoid", 37), ("softplus", 37), ("sigmoid", 1)])
def test_products_of_rows_equal_those_in_float64(
    operations: Any, dtype: torch.dtype, activation: Any, heads: int
) -> None:
    """The rows are some columns of wider ones; those of one head are multiplied with one number."""
    x, by = randn(13, 50, dtype=dtype)[:, 5:42], (20 * randn(13, 61, seed=1)).to(dtype)[:, 24 : 24 + heads]
    out = operations.multiply(x, by, activation)
    compute: dict[Any, Any] = {"sigmoid": torch.sigmoid, "softplus": torch.nn.functional.softplus}
    assert out.dtype == dtype
    assert out.is_contiguous()
    expected = x.double() * (compute[activation](by.double()) if activation else by.double())
    assert torch.allclose(out.double(), expected, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-12)
    for row in range(13):
        assert torch.equal(operations.multiply(x[row : row + 1], by[row : row + 1], activation)[0], out[row])

"""Kernels of layers that keep a state: equal to torch's in every shape, and with the same bits everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError
from baton.runner.backends.kernel_choice import CompiledOperations
from baton.runner.backends.torch_operations import TorchOperations
from tests.support.kernel_inputs import DTYPES, relative_error
from tests.support.pairs import all_pairs
from tests.support.stateful_rows import Convolved, Recurred

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

ISAS = kernels.available().isas
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-4}
"""In bfloat16 numbers near the middle between two may be rounded to either."""


def compare(compiled: Any, plain: Any) -> None:
    """Compare the kernels' outputs and memory with torch's, for steps that begin and go on sequences."""
    lengths = compiled.lengths
    for chunks in (
        [(index, 0, length // 2) for index, length in enumerate(lengths)],
        [(index, length // 2, length) for index, length in enumerate(lengths)],
    ):
        found = compiled.compute(CompiledOperations(2, ""), chunks)
        expected = plain.compute(TorchOperations(1), chunks)
        assert found.dtype == expected.dtype
        assert relative_error(found, expected.double()) < TOLERANCE[found.dtype]
        assert torch.equal(compiled.view.memory.isnan(), plain.view.memory.isnan())
        memories = (rows.view.memory.nan_to_num() for rows in (compiled, plain))
        assert relative_error(*(memory.double() for memory in memories)) < 2e-6


@all_pairs(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "lengths": [(1,), (70,), (3, 40, 1)],
        "taps": [2, 3, 4, 70],
        "width": [1, 16, 50, 200],
        "activation, has_bias": [(None, False), ("silu", True), ("silu", False)],
        "block_size": [1, 16, 100],
    }
)
def test_convolutions_equal_those_of_torch(
    isa: str, dtype: torch.dtype, lengths: Any, taps: int, width: int, activation: Any, has_bias: bool, block_size: int
) -> None:
    kernels.use_isa(isa)
    rows = [
        Convolved(
            lengths=lengths,
            shape=(taps - 1, width),
            dtype=dtype,
            block_size=block_size,
            activation=activation,
            has_bias=has_bias,
        )
        for _ in range(2)
    ]
    compare(*rows)


@all_pairs(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "lengths": [(1,), (70,), (3, 40, 1)],
        "heads, groups": [(1, 1), (4, 2), (6, 1), (3, 3)],
        "key_dim": [1, 16, 50, 128],
        "value_dim": [1, 16, 64, 72, 130],
        "decay_per_key": [False, True],
        "rule, norm_eps": [("plain", None), ("delta", 1e-6), ("delta", None), ("factor", 0.1)],
        "block_size": [1, 16, 100],
    }
)
def test_recurrences_equal_those_of_torch(
    isa: str,
    dtype: torch.dtype,
    lengths: Any,
    heads: int,
    groups: int,
    key_dim: int,
    value_dim: int,
    decay_per_key: bool,
    rule: Any,
    norm_eps: float | None,
    block_size: int,
) -> None:
    kernels.use_isa(isa)
    rows = [
        Recurred(
            lengths=lengths,
            shape=(heads, key_dim, value_dim),
            dtype=dtype,
            block_size=block_size,
            groups=groups,
            decay_per_key=decay_per_key,
            rule=rule,
            norm_eps=norm_eps,
        )
        for _ in range(2)
    ]
    compare(*rows)


def test_the_largest_heads_are_computed() -> None:
    rows = [Recurred(lengths=(5,), shape=(1, 512, 512)) for _ in range(2)]
    compare(*rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay_per_key", [False, True])
def test_all_instruction_sets_compute_the_same_bits(dtype: torch.dtype, decay_per_key: bool) -> None:
    found: list[torch.Tensor] = []
    for isa in ISAS:
        kernels.use_isa(isa)
        rule: Any = "delta" if decay_per_key else "factor"
        recurred = Recurred(lengths=(45, 3), shape=(2, 33, 90), dtype=dtype, decay_per_key=decay_per_key, rule=rule)
        convolved = Convolved(lengths=(45, 3), shape=(3, 90), dtype=dtype)
        layers = (recurred, convolved, channels(dtype))
        found += [layer.compute(CompiledOperations(2, ""), layer.whole) for layer in layers]
        found += [layer.view.memory.nan_to_num() for layer in layers]
    for one, other in zip(found[6:], found, strict=False):
        assert torch.equal(one, other)


def channels(dtype: torch.dtype) -> Recurred:
    """Heads with one value each, and rates."""
    how: Any = {"rule": "factor", "norm_eps": None, "has_rates": True}
    return Recurred(lengths=(45, 3), shape=(150, 5, 1), dtype=dtype, **how)


@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_with_rates_have_the_bits_of_heads_with_decays(dtype: torch.dtype) -> None:
    with_rates, with_decays = channels(dtype), channels(dtype)
    call = with_decays.call(with_decays.whole)
    assert call.rates is not None
    decays = (call.decay[..., None] * call.rates.T).contiguous()
    expected = kernels.recur(replace(call, decay=decays, rates=None), threads=1)
    assert torch.equal(with_rates.compute(CompiledOperations(2, ""), with_rates.whole), expected)
    assert torch.equal(with_rates.view.memory.nan_to_num(), with_decays.view.memory.nan_to_num())


@settings(max_examples=25)
@given(
    split=st.lists(st.integers(1, 60), max_size=5),
    threads=st.sampled_from([1, 2, 3]),
    block_size=st.sampled_from([1, 7, 32, 100]),
    others=st.integers(0, 2),
    layer=st.sampled_from(["convolution", "recurrence", "wide head"]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_prompt_has_the_same_bits_in_every_chunk_batch_and_team(
    split: list[int], threads: int, block_size: int, others: int, layer: str, dtype: torch.dtype
) -> None:
    length, make = 120, Convolved if layer == "convolution" else Recurred
    shape = {"convolution": (3, 150), "recurrence": (6, 24, 40), "wide head": (1, 24, 200)}[layer]
    whole = make(lengths=(length,), shape=shape, dtype=dtype, block_size=block_size)
    expected = whole.compute(CompiledOperations(1, ""), whole.whole)
    cut = make(lengths=(length, 60, 9), shape=shape, dtype=dtype, block_size=block_size, placement=3)
    first = 0
    for size in [*split, length]:
        behind = min(length, first + size)
        if first == behind:
            break
        beside = [(1, 0, 60), (2, 0, 9)][:others]
        found = cut.compute(CompiledOperations(threads, ""), [(0, first, behind), *beside])
        assert torch.equal(found[: behind - first], expected[first:behind])
        first = behind
    assert torch.equal(cut.states(0), whole.states(0))


def test_rows_may_be_columns_of_wider_ones() -> None:
    layer = Recurred(lengths=(20,), shape=(4, 16, 16), groups=4)
    call = layer.call(layer.whole)
    joined = torch.cat([part.flatten(1) for part in (call.query, call.key, call.value)], dim=1)
    query, key, value = (part.view(20, 4, 16) for part in joined.split_with_sizes([64] * 3, dim=1))
    expected = layer.compute(CompiledOperations(2, ""), layer.whole)
    assert torch.equal(kernels.recur(type(call)(query, key, value, *_rest(call)), threads=2), expected)
    turned = call.value.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(KernelArgumentError, match="value: has rows that are not contiguous"):
        kernels.recur(type(call)(query, key, turned, *_rest(call)), threads=2)


def _rest(call: Any) -> tuple[Any, ...]:
    return call.decay, call.beta, call.scale, call.norm_eps, call.state, call.step

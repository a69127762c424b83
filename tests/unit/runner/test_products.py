"""What products keep whatever the kind of their weights: a row's bits are its own, and parts stand side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch

from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError, Packed, Program
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cpu.kernels.weights import Weight
from baton.runner.backends.quantized_weight import Float8Weight, QuantizedWeight
from tests.support.kernel_inputs import (
    DTYPES,
    FLOAT8_SHAPES,
    INTEGER_KINDS,
    INTEGER_SHAPES,
    activated,
    constant_zero,
    float8,
    misfits,
    mixed_integers,
    nested,
    one_request,
    own_zeros,
    randn,
    relative_error,
)
from tests.support.pairs import all_pairs

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

ISAS = kernels.available().isas


@dataclass(frozen=True)
class Kind:
    """A kind of weights."""

    make: Callable[[int, int, int, torch.dtype], Weight]
    """A weight [n, k] from n, k, a seed, and the dtype of a plain weight."""
    k: int
    long_k: int
    """So many inputs that they are cut into pieces where there are many rows."""


KINDS: Mapping[str, Kind] = {
    "plain": Kind(lambda n, k, seed, dtype: randn(n, k, seed=seed, dtype=dtype), 320, 2100),
    "plain, odd": Kind(lambda n, k, seed, dtype: randn(n, k, seed=seed, dtype=dtype), 131, 901),
    "int4": Kind(lambda n, k, seed, _: own_zeros(n, k, 4, 32, seed), 320, 4160),
    "int8": Kind(lambda n, k, seed, _: own_zeros(n, k, 8, 32, seed), 320, 2080),
    "int4, nested": Kind(lambda n, k, seed, _: nested(n, k, 4, 32, seed), 320, 4160),
    "int8, nested": Kind(lambda n, k, seed, _: nested(n, k, 8, 32, seed), 320, 2080),
    "float8": Kind(lambda n, k, seed, _: float8(n, k, 128, seed), 320, 1024),
    "float8, one group": Kind(lambda n, k, seed, _: float8(n, k, 1024, seed), 131, 901),
}
ONE_OF_EACH = ("plain", "int4", "float8")


def of_every_kernel(test: Callable[..., None]) -> Callable[..., None]:
    """Pairs would not do: plain weights in bfloat16 have a kernel of their own, for some instruction sets."""
    for name, values in (("isa", ISAS), ("dtype", DTYPES), ("kind", KINDS)):
        test = pytest.mark.parametrize(name, list(values), ids=str)(test)
    return test


def linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None, threads: int = 1) -> torch.Tensor:
    return kernels.linear(x, weight, bias, threads=threads)


@of_every_kernel
def test_a_row_does_not_depend_on_its_batch_or_the_threads(isa: str, dtype: torch.dtype, kind: str) -> None:
    kernels.use_isa(isa)
    make, k, long_k = KINDS[kind].make, KINDS[kind].k, KINDS[kind].long_k
    x, bias, packed = randn(60, k, dtype=dtype), randn(130, seed=5, dtype=dtype), kernels.pack(make(130, k, 1, dtype))
    whole = linear(x, packed, bias)
    for rows in (*range(1, 40), 59):
        assert torch.equal(linear(x[60 - rows :].clone(), packed, bias, threads=2), whole[60 - rows :]), rows
    for row in (0, 7, 59):
        assert torch.equal(linear(x[row : row + 1].clone(), packed, bias), whole[row : row + 1])
    large, packed = randn(130, long_k, dtype=dtype), kernels.pack(make(70, long_k, 1, dtype))
    whole, other = (linear(large, packed, threads=threads) for threads in (1, 5))
    assert torch.equal(other, whole)
    for some in (slice(51, 90), slice(20, 127), slice(77, 78)):
        assert torch.equal(linear(large[some], packed, threads=2), whole[some])


@all_pairs({"dtype": DTYPES, "kind": list(KINDS)})
def test_instruction_sets_agree_in_every_bit(dtype: torch.dtype, kind: str) -> None:
    """All but AMX, which adds up products of bfloat16 in another order."""
    k, make = KINDS[kind].k, KINDS[kind].make
    x, weights = randn(20, k, dtype=dtype), [make(70, k, seed, dtype) for seed in (1, 20)]
    has_order_of_amx = dtype == torch.bfloat16 and not isinstance(weights[0], QuantizedWeight)
    results = []
    for isa in ISAS:
        if isa == "amx_bf16" and has_order_of_amx:
            continue
        kernels.use_isa(isa)
        gated = kernels.gated_linear(x, kernels.pack_gated(*weights), activation="silu", threads=1)
        results.append(torch.cat([linear(x, kernels.pack(weights[0])), gated]))
    assert all(torch.equal(result, results[-1]) for result in results)


@of_every_kernel
def test_rows_of_x_may_have_a_stride(isa: str, dtype: torch.dtype, kind: str) -> None:
    kernels.use_isa(isa)
    k, make = KINDS[kind].k, KINDS[kind].make
    part, packed = randn(40, k + 60, dtype=dtype)[:, 31 : 31 + k], kernels.pack(make(70, k, 1, dtype))
    assert torch.equal(linear(part, packed, threads=2), linear(part.contiguous(), packed))


@of_every_kernel
def test_numbers_that_are_not_finite_stay_in_their_row(isa: str, dtype: torch.dtype, kind: str) -> None:
    kernels.use_isa(isa)
    k, make = KINDS[kind].k, KINDS[kind].make
    x, packed = randn(20, k, dtype=dtype), kernels.pack(make(70, k, 1, dtype))
    clean, others = linear(x, packed), torch.arange(20) != 7
    for bad in (float("nan"), float("inf"), float("-inf")):
        x[7, 3] = bad
        out = linear(x, packed)
        assert not out[7].isfinite().any()
        assert torch.equal(out[others], clean[others])


@of_every_kernel
def test_products_of_zeros_and_of_no_rows(isa: str, dtype: torch.dtype, kind: str) -> None:
    kernels.use_isa(isa)
    k, make = KINDS[kind].k, KINDS[kind].make
    packed = kernels.pack(make(70, k, 1, dtype))
    assert not linear(torch.zeros(3, k, dtype=dtype), packed).any()
    assert not linear(torch.full((1, k), 1e-40, dtype=dtype), packed).any(), "subnormal numbers are zeros"
    assert linear(randn(0, k, dtype=dtype), packed).shape == (0, 70)


# Several weights in one


@dataclass(frozen=True)
class Stack:
    """Weights that are packed together, and the numbers of outputs of the parts that are packed as one."""

    make: Callable[[torch.dtype], list[Weight]]
    parts: tuple[int, ...] = ()


def plain_stack(*widths: int) -> Stack:
    return Stack(lambda dtype: [randn(n, 45, seed=n + place, dtype=dtype) for place, n in enumerate(widths)])


STACKS: Mapping[str, Stack] = {
    "plain": plain_stack(70, 5, 33),
    "plain, whole panels": plain_stack(64, 64),
    "plain, a quarter of a panel": plain_stack(16, 1),
    "plain, single outputs": plain_stack(1, 1, 1),
    "integers": Stack(lambda dtype: [*mixed_integers(), randn(11, 96, seed=8, dtype=dtype)], (70, 53, 16, 11)),
    "float8": Stack(
        lambda dtype: [
            *(float8(70, 256, 128), float8(33, 256, 128, 5), float8(20, 256, 256)),
            *(constant_zero(16, 256, 8, 32), randn(11, 256, seed=8, dtype=dtype)),
        ],
        (103, 20, 16, 11),
    ),
}


@all_pairs({"dtype": DTYPES, "name": list(STACKS)})
def test_weights_packed_together_are_their_products_side_by_side(dtype: torch.dtype, name: str) -> None:
    weights = STACKS[name].make(dtype)
    together, sizes = kernels.pack(*weights), [weight.shape[0] for weight in weights]
    if STACKS[name].parts:
        assert isinstance(together, kernels.StackedWeight)
        assert tuple(part.n for part in together.parts) == STACKS[name].parts
    x, bias = randn(9, weights[0].shape[1], dtype=dtype), randn(sum(sizes), seed=7, dtype=dtype)
    alone = [
        linear(x, kernels.pack(weight), part) for weight, part in zip(weights, torch.split(bias, sizes), strict=True)
    ]
    assert torch.equal(linear(x, together, bias, threads=2), torch.cat(alone, dim=1))
    rows = torch.cat([weight if isinstance(weight, torch.Tensor) else weight.dequantized(dtype) for weight in weights])
    index = torch.tensor([0, len(rows) - 1, len(rows) // 2, *range(len(rows)), 0])
    assert torch.equal(kernels.take_rows(together, index, dtype, threads=2), rows[index])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_taken_rows_are_those_of_the_dequantised_weight(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    kinds = itertools.product(INTEGER_KINDS, (4, 8), INTEGER_SHAPES)
    weights: list[QuantizedWeight | Float8Weight] = [kind(n, k, bits, group) for kind, bits, (n, k, group) in kinds]
    for weight in [*weights, *(float8(*shape) for shape in FLOAT8_SHAPES)]:
        taken = kernels.take_rows(kernels.pack(weight), torch.arange(weight.shape[0]), dtype)
        assert torch.equal(taken, weight.dequantized(dtype)), (weight.shape, weight.group)


def in_groups(weight: QuantizedWeight, group: int) -> QuantizedWeight:
    """The same weight in smaller groups, with its numbers in float32."""
    times, offsets = weight.group // group, weight.float32_offsets()
    zeros = weight.zeros if isinstance(weight.zeros, int) else weight.zeros.repeat_interleave(times, dim=1)
    return replace(
        weight,
        group=group,
        scales=weight.float32_scales().repeat_interleave(times, dim=1),
        scale_factors=None,
        zeros=zeros,
        offsets=None if offsets is None else offsets.repeat_interleave(times, dim=1),
        offset_factors=None,
    )


def exact_sums(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """A product in float64."""
    wide = weight if isinstance(weight, torch.Tensor) else weight.dequantized(torch.float64)
    return x.double() @ wide.double().T


def rounded_sums(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """A product with integers as the kernels compute it, which round x; tests of `linear` bound that error."""
    return kernels.linear(x, kernels.pack(weight), out_dtype=torch.float32, threads=1).double()


def sums_rounded_in_16(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    assert isinstance(weight, QuantizedWeight)
    return rounded_sums(x, in_groups(weight, 16))


@dataclass(frozen=True)
class Gate:
    """The two weights of a gated product, and another way to the product with each."""

    make: Callable[[torch.dtype], tuple[Weight, Weight]]
    sums: Callable[[torch.Tensor, Weight], torch.Tensor] = exact_sums


def plain_gate(n: int, k: int) -> Gate:
    return Gate(lambda dtype: (randn(n, k, seed=1, dtype=dtype), randn(n, k, seed=2, dtype=dtype)))


GATES: Mapping[str, Gate] = {
    **{f"plain {n}x{k}": plain_gate(n, k) for n, k in ((1, 1), (33, 96), (130, 45), (16, 64))},
    "integers": Gate(lambda _: (constant_zero(33, 96, 4, 32), constant_zero(33, 96, 4, 32, 5)), rounded_sums),
    # Formats that differ get the groups that fit into both, and x is rounded in those.
    "integers of two formats": Gate(lambda _: (nested(33, 96, 4, 32), own_zeros(33, 96, 8, 48)), sums_rounded_in_16),
    "float8": Gate(lambda _: (float8(33, 320, 128), float8(33, 320, 128, 5))),
    "float8, one group and three": Gate(lambda _: (float8(33, 320, 320), float8(33, 320, 128, 5))),
    "float8, groups that overlap": Gate(lambda _: (float8(33, 320, 192), float8(33, 320, 128, 5))),
}


@all_pairs({"isa": ISAS, "dtype": DTYPES, "activation": ["silu", "gelu", "gelu_tanh"], "name": list(GATES)})
def test_a_gated_product_is_the_activation_of_one_times_the_other(
    isa: str, dtype: torch.dtype, activation: Activation, name: str
) -> None:
    kernels.use_isa(isa)
    weights = GATES[name].make(dtype)
    x, packed = randn(60, weights[0].shape[1], dtype=dtype) / 10, kernels.pack_gated(*weights)
    out = kernels.gated_linear(x, packed, activation=activation, threads=2)
    assert out.dtype == dtype
    gate, up = (GATES[name].sums(x, weight) for weight in weights)
    assert relative_error(out, activated(gate, activation) * up) < (2.2e-3 if dtype == torch.bfloat16 else 2e-6)
    for rows in (slice(0, 1), slice(17, 54), slice(59, 60)):
        assert torch.equal(kernels.gated_linear(x[rows].clone(), packed, activation=activation, threads=1), out[rows])


# Programs


PROGRAMS: Mapping[str, Callable[[], tuple[Packed, Packed, Packed]]] = {
    "integers": lambda: (
        kernels.pack(*mixed_integers()),
        kernels.pack_gated(constant_zero(64, 96, 4, 32), constant_zero(64, 96, 4, 32, 5)),
        kernels.pack(own_zeros(96, 64, 8, 64)),
    ),
    "float8": lambda: (
        kernels.pack(float8(70, 256, 128), constant_zero(69, 256, 8, 32)),
        kernels.pack_gated(float8(64, 256, 128), float8(64, 256, 128, 5)),
        kernels.pack(float8(256, 64, 64)),
    ),
}
"""A stack of 139 outputs, a gated product of the same inputs with 64 outputs, and a product with these."""


@all_pairs({"isa": ISAS, "dtype": DTYPES, "name": list(PROGRAMS)})
def test_a_program_computes_what_single_calls_do(isa: str, dtype: torch.dtype, name: str) -> None:
    kernels.use_isa(isa)
    (stacked, gated, down), program = PROGRAMS[name](), Program(dtype, 2)
    k, bias = {"integers": 96, "float8": 256}[name], randn(139, seed=2, dtype=dtype)
    x, out, sampled_out = program.argument(k), program.argument(139), program.argument(k, sampled=True)
    program.linear(x, stacked, bias, into=out)
    inner = program.gated_linear(x, gated, "silu", into="inner")
    program.linear(program.take_sampled(inner, into="sampled"), down, None, into=sampled_out)
    for rows in (1, 3, 70, 2):
        step, sampled = randn(rows, k, seed=rows, dtype=dtype), torch.arange(rows - 1, -1, -2)
        results = torch.empty(rows, 139, dtype=dtype), torch.empty(len(sampled), k, dtype=dtype)
        program.run([step, *results], one_request(rows), sampled)
        assert torch.equal(results[0], linear(step, stacked, bias))
        inner_rows = kernels.gated_linear(step, gated, activation="silu", threads=1)[sampled]
        assert torch.equal(results[1], linear(inner_rows, down))
    with pytest.raises(KernelArgumentError, match="has 139"):
        program.linear(out, stacked, None, into="wrong")
    with pytest.raises(KernelArgumentError, match="gated"):
        program.gated_linear(x, stacked, "silu", into="wrong")


# Refused arguments


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_products_refuse_what_does_not_fit(kind: str) -> None:
    weight = constant_zero(6, 64, 4, 32) if kind == "int4" else KINDS[kind].make(6, 64, 1, torch.float32)
    packed, gated = kernels.pack(weight), kernels.pack_gated(weight, weight)
    for x, bias, argument in misfits():
        with pytest.raises(KernelArgumentError) as error:
            linear(x, packed, bias)
        assert error.value.argument == argument
    with pytest.raises(KernelArgumentError, match="w: "):
        linear(randn(2, 64), gated)
    with pytest.raises(KernelArgumentError, match="gated"):
        kernels.gated_linear(randn(2, 64), packed, activation="silu", threads=1)
    for index in (-1, 6):
        with pytest.raises(KernelArgumentError, match="index"):
            kernels.take_rows(packed, torch.tensor([0, index]), torch.float32)
    with pytest.raises(KernelArgumentError, match="gated"):
        kernels.take_rows(gated, torch.tensor([0]), torch.float32)
    if kind != "plain":
        with pytest.raises(KernelArgumentError, match="dtype"):
            kernels.take_rows(packed, torch.tensor([0]))


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_weights_that_do_not_fit_together_are_not_packed(kind: str) -> None:
    good, shorter, wider = (KINDS[kind].make(n, k, 1, torch.float32) for n, k in ((8, 128), (8, 96), (9, 128)))
    with pytest.raises(KernelArgumentError, match="unlike the first"):
        kernels.pack(good, shorter)
    with pytest.raises(KernelArgumentError, match="up"):
        kernels.pack_gated(good, wider)
    for other in {"plain", "int4", "float8"} - {kind}:
        with pytest.raises(KernelArgumentError, match="up: must be of the gate's kind"):
            kernels.pack_gated(good, KINDS[other].make(8, 128, 1, torch.float32))


def test_a_plain_weight_of_another_dtype_is_not_packed() -> None:
    with pytest.raises(KernelArgumentError, match="float64"):
        kernels.pack(randn(2, 2).double())

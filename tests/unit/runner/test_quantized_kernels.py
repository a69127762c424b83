"""Products of quantised weights: against float64, and the same bits on every instruction set and in every batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError, Packed, Program
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.quantized_product import quantize_rows, quantized_product
from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.backends.torch_operations import TorchOperations
from tests.support import reference_operations as reference
from tests.support.kernel_inputs import activated, generator, misfits, one_request, randn

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

DTYPES = [torch.float32, torch.bfloat16]
ISAS = kernels.available().isas


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    kernels.use_isa(None)


def _bytes(*shape: int, below: int, seed: int) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=generator(seed), dtype=torch.uint8)


def constant_zero(n: int, k: int, bits: int, group: int, seed: int = 1) -> QuantizedWeight:
    """As GGUF's Q4_0 and Q8_0: one float16 scale for each group."""
    codes, zero = _bytes(n, k, below=1 << bits, seed=seed), 1 << bits - 1
    return QuantizedWeight(codes, bits, group, randn(n, k // group, seed=seed + 1).half(), zeros=zero)


def own_zeros(n: int, k: int, bits: int, group: int, seed: int = 1) -> QuantizedWeight:
    """As AWQ: a zero for each group; with scales in bfloat16."""
    weight = constant_zero(n, k, bits, group, seed)
    zeros = _bytes(n, k // group, below=1 << bits, seed=seed + 2)
    return replace(weight, scales=weight.scales.bfloat16(), zeros=zeros)


def with_offsets(n: int, k: int, bits: int, group: int, seed: int = 1) -> QuantizedWeight:
    """As GGUF's Q4_1, with float32 numbers."""
    weight = constant_zero(n, k, bits, group, seed)
    return replace(weight, scales=weight.scales.float(), zeros=0, offsets=randn(n, k // group, seed=seed + 3))


def nested(n: int, k: int, bits: int, group: int, seed: int = 1) -> QuantizedWeight:
    """As GGUF's K formats: scales and offsets of 8 bits, and a factor for every few of them."""
    weight, groups = constant_zero(n, k, bits, group, seed), k // group
    together = max(r for r in (1, 2, 3, 8) if groups % r == 0)
    return replace(
        weight,
        scales=(_bytes(n, groups, below=255, seed=seed + 4).int() - 127).to(torch.int8),
        scale_factors=randn(n, groups // together, seed=seed + 5).half(),
        offsets=_bytes(n, groups, below=64, seed=seed + 6),
        offset_factors=randn(n, groups // together, seed=seed + 7).half(),
    )


KINDS = [constant_zero, own_zeros, with_offsets, nested]
SHAPES = [
    (1, 4, 4),
    (70, 48, 16),
    (33, 120, 24),
    (130, 256, 32),
    (17, 320, 64),
    (65, 384, 128),
    (5, 100, 100),
    (3, 60, 20),
]
"""Numbers n, k and group."""


def _mixed() -> tuple[QuantizedWeight, ...]:
    """Weights of three formats; the second and third can be packed together."""
    return (
        nested(70, 96, 4, 32),
        constant_zero(33, 96, 8, 16),
        constant_zero(20, 96, 8, 16, 9),
        own_zeros(16, 96, 4, 48),
    )


def _error_bound(x: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The most by which a product [m, n] may differ from the exact one.

    An element of x is rounded by at most half its block's scale. Each block adds two roundings of float32, relative to
    a sum of magnitudes, and the result is rounded to the dtype.
    """
    wide = weight.dequantized(torch.float64)
    parts = weight.codes.double() - (
        weight.zeros if isinstance(weight.zeros, int) else weight.zeros.double().repeat_interleave(weight.group, dim=1)
    )
    magnitude = (parts * weight.float32_scales().double().repeat_interleave(weight.group, dim=1)).abs()
    offsets = weight.float32_offsets()
    if offsets is not None:
        magnitude += offsets.double().abs().repeat_interleave(weight.group, dim=1)
    block = max(size for size in range(4, 33, 4) if weight.group % size == 0)
    half = quantize_rows(x, block).scales.double().repeat_interleave(block, dim=1) / 2
    of_x = half @ wide.abs().T
    sums = (x.double().abs() + half) @ magnitude.T
    of_chain = sums * (4 * (x.shape[1] // block) + 4) * 2.0**-24
    of_result = (x.double() @ wide.T).abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-23)
    return of_x * (1 + 2.0**-7) + of_chain + of_result + 1e-30


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_differs_from_float64_by_the_rounding_of_x_alone(
    isa: str, dtype: torch.dtype, bits: int, kind: object
) -> None:
    kernels.use_isa(isa)
    for n, k, group in SHAPES:
        weight: QuantizedWeight = kind(n, k, bits, group)  # type: ignore[operator]
        for m in (1, 3, 13):
            x = randn(m, k, dtype=dtype) * torch.linspace(0.1, 10, k).to(dtype)
            out = kernels.linear(x, kernels.pack(weight), threads=2)
            assert out.dtype == dtype
            expected = x.double() @ weight.dequantized(torch.float64).T
            assert ((out.double() - expected).abs() <= _error_bound(x, weight, dtype)).all(), (n, k, group, m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set_gives_the_bits_of_the_plain_product(dtype: torch.dtype, bits: int, kind: object) -> None:
    for n, k, group in SHAPES:
        weight: QuantizedWeight = kind(n, k, bits, group)  # type: ignore[operator]
        x = randn(20, k, seed=3, dtype=dtype) * 5
        expected = quantized_product(x, weight).to(dtype)
        for isa in ISAS:
            kernels.use_isa(isa)
            assert torch.equal(kernels.linear(x, kernels.pack(weight), threads=1), expected), (isa, n, k, group)


def test_codes_of_the_largest_magnitude_do_not_overflow() -> None:
    for bits in (4, 8):
        weight = replace(constant_zero(70, 64, bits, 32), zeros=0)
        weight.codes.fill_((1 << bits) - 1)
        x = torch.cat([torch.ones(1, 64), -torch.ones(1, 64)])
        expected = quantized_product(x, weight)
        for isa in ISAS:
            kernels.use_isa(isa)
            assert torch.equal(kernels.linear(x, kernels.pack(weight), threads=1), expected), isa


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_its_batch_or_the_threads(isa: str, dtype: torch.dtype, bits: int) -> None:
    kernels.use_isa(isa)
    x, bias = randn(60, 640, dtype=dtype), randn(200, seed=5, dtype=dtype)
    for kind in (own_zeros, nested):
        packed = kernels.pack(kind(200, 640, bits, 32))
        whole = kernels.linear(x, packed, bias, threads=1)
        for rows in range(1, 41):
            assert torch.equal(kernels.linear(x[60 - rows :], packed, bias, threads=2), whole[60 - rows :]), rows
        for row in (0, 7, 59):
            assert torch.equal(kernels.linear(x[row : row + 1].clone(), packed, bias, threads=1)[0], whole[row])
    large, packed = randn(700, 2048, dtype=dtype), kernels.pack(nested(70, 2048, bits, 32))
    results = [kernels.linear(large, packed, threads=threads) for threads in (1, 2, 5)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert torch.equal(kernels.linear(large[301:340], packed, threads=2), results[0][301:340])


def test_rows_of_x_may_have_a_stride() -> None:
    wide, packed = randn(40, 300), kernels.pack(own_zeros(70, 96, 4, 32))
    part = wide[:, 31:127]
    assert torch.equal(kernels.linear(part, packed, threads=2), kernels.linear(part.contiguous(), packed, threads=1))


@pytest.mark.parametrize("isa", ISAS)
def test_numbers_that_are_not_finite_stay_in_their_row(isa: str) -> None:
    kernels.use_isa(isa)
    packed = kernels.pack(own_zeros(70, 96, 4, 32))
    x = randn(20, 96)
    clean = kernels.linear(x, packed, threads=1)
    for bad in (float("nan"), float("inf"), float("-inf")):
        x[7, 3] = bad
        out = kernels.linear(x, packed, threads=1)
        assert out[7].isnan().all()
        assert torch.equal(torch.cat([out[:7], out[8:]]), torch.cat([clean[:7], clean[8:]]))


@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_zeros_and_no_rows_are_multiplied(isa: str) -> None:
    kernels.use_isa(isa)
    packed = kernels.pack(nested(70, 96, 4, 32))
    assert not kernels.linear(torch.zeros(3, 96), packed, threads=1).any()
    assert not kernels.linear(torch.full((1, 96), 1e-40), packed, threads=1).any()
    assert kernels.linear(torch.zeros(0, 96), packed, threads=1).shape == (0, 70)


def test_a_packed_weight_is_as_small_as_its_format() -> None:
    q4_0, q4_k = constant_zero(640, 1024, 4, 32), nested(640, 1024, 4, 32)
    for weight, bits in ((q4_0, 4.5), (q4_k, 4 + 16 / 32 + 32 / 256), (constant_zero(640, 1024, 8, 32), 8.5)):
        packed = kernels.pack(weight)
        assert isinstance(packed, kernels.PackedQuantizedWeight)
        assert packed.storage.numel() * 8 == bits * 640 * 1024


# Stacked and gated weights


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_several_formats_are_their_products_side_by_side(dtype: torch.dtype) -> None:
    x, plain = randn(9, 96, dtype=dtype), randn(11, 96, seed=8, dtype=dtype)
    weights: list[torch.Tensor | QuantizedWeight] = [*_mixed(), plain]
    together = kernels.pack(*weights)
    assert isinstance(together, kernels.StackedWeight)
    assert [part.n for part in together.parts] == [70, 53, 16, 11]
    bias = randn(150, seed=7, dtype=dtype)
    alone = [
        kernels.linear(x, kernels.pack(weight), part, threads=1)
        for weight, part in zip(weights, torch.split(bias, [70, 33, 20, 16, 11]), strict=True)
    ]
    assert torch.equal(kernels.linear(x, together, bias, threads=2), torch.cat(alone, dim=1))
    assert torch.equal(
        kernels.linear(x, together, threads=1)[:, :70], kernels.linear(x, kernels.pack(weights[0]), threads=1)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_taken_rows_are_those_of_the_dequantised_weight(dtype: torch.dtype) -> None:
    index = torch.tensor([0, 138, 69, 70, 122, 123, 0, 149])
    weights = _mixed()
    plain = randn(11, 96, seed=8, dtype=dtype)
    rows = torch.cat([*(weight.dequantized(dtype) for weight in weights), plain])
    taken = kernels.take_rows(kernels.pack(*weights, plain), index, dtype, threads=2)
    assert torch.equal(taken, rows[index])
    for kind in KINDS:
        for bits in (4, 8):
            for n, k, group in SHAPES:
                weight = kind(n, k, bits, group)
                taken = kernels.take_rows(kernels.pack(weight), torch.arange(n), dtype)
                assert torch.equal(taken, weight.dequantized(dtype)), (n, k, group)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gated_product_is_the_activation_of_one_times_the_other(
    isa: str, dtype: torch.dtype, activation: Activation
) -> None:
    kernels.use_isa(isa)
    x = randn(13, 96, dtype=dtype)
    alike = constant_zero(33, 96, 4, 32), constant_zero(33, 96, 4, 32, 5)
    different = nested(33, 96, 4, 32), own_zeros(33, 96, 8, 48)
    for (gate, up), group in ((alike, 32), (different, 16)):
        packed = kernels.pack_gated(gate, up)
        out = kernels.gated_linear(x, packed, activation=activation, threads=2)
        assert out.dtype == dtype
        # Formats that differ get the groups that fit into both, and x is rounded in those.
        sums = [kernels.linear(x.float(), kernels.pack(_in_groups(one, group)), threads=1) for one in (gate, up)]
        expected = activated(sums[0], activation) * sums[1]
        error = float((out.float() - expected).norm() / expected.norm())
        assert error < (2.2e-3 if dtype == torch.bfloat16 else 2e-6)
        for row in (0, 12):
            alone = kernels.gated_linear(x[row : row + 1], packed, activation=activation, threads=1)
            assert torch.equal(alone[0], out[row])


def _in_groups(weight: QuantizedWeight, group: int) -> QuantizedWeight:
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


# Programs


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_program_computes_what_single_calls_do(dtype: torch.dtype) -> None:
    program, stacked = Program(dtype, 2), kernels.pack(*_mixed())
    gated = kernels.pack_gated(constant_zero(64, 96, 4, 32), constant_zero(64, 96, 4, 32, 5))
    down = kernels.pack(own_zeros(96, 64, 8, 64))
    bias = randn(139, seed=2, dtype=dtype)
    x, out, sampled_out = program.argument(96), program.argument(139), program.argument(96, sampled=True)
    program.linear(x, stacked, bias, into=out)
    inner = program.gated_linear(x, gated, "silu", into="inner")
    program.linear(program.take_sampled(inner, into="sampled"), down, None, into=sampled_out)
    for rows in (1, 3, 70, 2):
        step, sampled = randn(rows, 96, seed=rows, dtype=dtype), torch.arange(rows - 1, -1, -2)
        results = torch.empty(rows, 139, dtype=dtype), torch.empty(len(sampled), 96, dtype=dtype)
        program.run([step, *results], one_request(rows), sampled)
        assert torch.equal(results[0], kernels.linear(step, stacked, bias, threads=1))
        inner_rows = kernels.gated_linear(step, gated, activation="silu", threads=1)[sampled]
        assert torch.equal(results[1], kernels.linear(inner_rows, down, threads=1))
    with pytest.raises(KernelArgumentError, match="x: has 139"):
        program.linear(out, stacked, None, into="wrong")
    with pytest.raises(KernelArgumentError, match="gated"):
        program.gated_linear(x, stacked, "silu", into="wrong")


# The other operations


@pytest.mark.parametrize("operations", [TorchOperations(1), reference])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_operations_compute_the_same(operations: TorchOperations | ModuleType, dtype: torch.dtype) -> None:
    x, bias = randn(21, 96, dtype=dtype), randn(139, seed=2, dtype=dtype)
    mixed, index = _mixed(), torch.tensor([3, 138, 71])
    packed = operations.pack(*mixed)
    assert torch.equal(operations.linear(x, packed, bias), kernels.linear(x, kernels.pack(*mixed), bias, threads=1))
    assert torch.equal(
        operations.take_rows(packed, index, dtype), kernels.take_rows(kernels.pack(*mixed), index, dtype)
    )
    gate, up = with_offsets(33, 96, 4, 32), with_offsets(33, 96, 4, 32, 9)
    x = x / 4  # so that the reference's exponential does not overflow
    out = operations.gated_linear(x, operations.pack_gated(gate, up), activation="silu")
    expected = kernels.gated_linear(x, kernels.pack_gated(gate, up), activation="silu", threads=1)
    torch.testing.assert_close(out, expected)
    stacked = operations.pack(mixed[0], randn(5, 96, seed=4, dtype=dtype))
    assert operations.linear(x, stacked).shape == (21, 75)
    assert operations.take_rows(stacked, torch.tensor([74, 0]), dtype).dtype == dtype


# Refused arguments


def test_weights_that_can_not_be_packed_are_refused_by_name() -> None:
    good, nest = constant_zero(8, 64, 4, 32), nested(8, 64, 4, 32)
    assert nest.scale_factors is not None
    assert nest.offset_factors is not None
    for weight, message in (
        (replace(good, bits=3), "3 bits"),
        (replace(good, bits=8, codes=good.codes.int()), "codes"),
        (replace(good, codes=good.codes + 16), "below 16"),
        (replace(good, group=30), "do not divide"),
        (replace(good, group=2), "--dequantize"),
        (replace(good, scales=good.scales[:, :1]), "scales"),
        (replace(good, scales=good.scales.double()), "scales"),
        (replace(good, scale_factors=nest.scale_factors), "scale factors"),
        (replace(nest, scale_factors=None), "scale factors"),
        (replace(nest, scale_factors=nest.scale_factors[:7]), "scale factors"),
        (replace(nest, scale_factors=nest.scale_factors.float()), "scale factors"),
        (replace(nest, offset_factors=nest.offset_factors.repeat(1, 2)), "offset factors"),
        (replace(nest, offsets=None), "offset factors"),
        (replace(good, zeros=256), "zeros"),
        (replace(good, zeros=good.codes), "zeros"),
    ):
        with pytest.raises(KernelArgumentError, match=message):
            kernels.pack(weight)
    with pytest.raises(KernelArgumentError, match="unlike the first"):
        kernels.pack(good, constant_zero(8, 96, 4, 32))
    with pytest.raises(KernelArgumentError, match="up"):
        kernels.pack_gated(good, constant_zero(9, 64, 4, 32))
    with pytest.raises(KernelArgumentError, match="up"):
        kernels.pack_gated(good, randn(8, 64))


def test_products_with_quantised_weights_refuse_what_does_not_fit() -> None:
    weights = constant_zero(6, 64, 4, 32), nested(5, 64, 8, 32)
    packed, stacked = kernels.pack(weights[0]), kernels.pack(*weights)
    gated = kernels.pack_gated(weights[0], weights[0])
    wrong: list[tuple[torch.Tensor, Packed, torch.Tensor | None, str]] = [
        *((x, packed, bias, argument) for x, bias, argument in misfits()),
        (randn(2, 64), stacked, randn(6), "bias"),
        (randn(2, 64), gated, None, "w"),
    ]
    for x, weight, bias, argument in wrong:
        with pytest.raises(KernelArgumentError) as error:
            kernels.linear(x, weight, bias, threads=1)
        assert error.value.argument == argument
    for weight in (packed, stacked):
        with pytest.raises(KernelArgumentError, match="gated"):
            kernels.gated_linear(randn(2, 64), weight, activation="silu", threads=1)
        for index in (-1, 11):
            with pytest.raises(KernelArgumentError, match="index"):
                kernels.take_rows(weight, torch.tensor([index]), torch.float32)
        with pytest.raises(KernelArgumentError, match="dtype"):
            kernels.take_rows(weight, torch.tensor([0]))
    with pytest.raises(KernelArgumentError, match="gated"):
        kernels.take_rows(gated, torch.tensor([0]), torch.float32)

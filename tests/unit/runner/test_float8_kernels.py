"""Products of weights in float8: the bits of plain products with the widened weight, in every batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from baton.errors import BatonError
from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError, Packed, PackedFloat8Weight, PackedWeight, Program
from baton.runner.backends.cpu.kernels.library import library
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cpu.kernels.weights import Weight
from baton.runner.backends.quantized_product import float8_product
from baton.runner.backends.quantized_weight import Float8Weight, QuantizedWeight
from baton.runner.backends.torch_operations import TorchOperations
from tests.support import reference_operations as reference
from tests.support.kernel_inputs import activated, generator, misfits, one_request, randn
from tests.support.pairs import all_pairs

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

DTYPES = [torch.float32, torch.bfloat16]
ISAS = kernels.available().isas
SHAPES = [(1, 4, 4), (70, 48, 32), (33, 120, 64), (130, 256, 128), (17, 300, 128), (65, 640, 640), (5, 33, 100)]
"""Numbers n, k and group; a row of the last is shorter than a group."""


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    kernels.use_isa(None)


def float8(n: int, k: int, group: int, seed: int = 1) -> Float8Weight:
    """A weight with numbers of all magnitudes, subnormal ones among them."""
    codes = torch.randint(0, 256, (n, k), generator=generator(seed), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 5
    scales = randn(n, -(-k // group), seed=seed + 1)
    return Float8Weight(codes.view(torch.float8_e4m3fn), scales, group)


def integers(n: int, k: int) -> QuantizedWeight:
    codes = torch.randint(0, 256, (n, k), generator=generator(7), dtype=torch.uint8)
    return QuantizedWeight(codes, 8, 32, randn(n, k // 32, seed=8), zeros=128)


def plainly(x: torch.Tensor, weight: Float8Weight) -> torch.Tensor:
    """The float32 sums [m, n] of the kernels' own products with the widened weight, added group by group."""
    sums = torch.zeros(x.shape[0], weight.shape[0])
    for index, first in enumerate(range(0, weight.shape[1], weight.group)):
        columns = slice(first, first + weight.group)
        part = kernels.pack(weight.codes[:, columns].to(x.dtype))
        products = kernels.linear(x[:, columns], part, out_dtype=torch.float32, threads=1)
        sums = (products.double() * weight.scales[:, index].double() + sums.double()).float()
    return sums


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_has_the_bits_of_plain_products_with_the_widened_weight(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    for n, k, group in SHAPES:
        weight = float8(n, k, group)
        packed = kernels.pack(weight)
        for m in (1, 3, 7, 13, 60):
            x = randn(m, k, seed=m, dtype=dtype) * 5
            out = kernels.linear(x, packed, threads=2)
            assert out.dtype == dtype
            assert torch.equal(out, plainly(x, weight).to(dtype)), (n, k, group, m)


@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_agree_in_every_bit(dtype: torch.dtype) -> None:
    alike = [isa for isa in ISAS if isa != "amx_bf16" or dtype == torch.float32]
    x, weight = randn(20, 300, dtype=dtype), float8(70, 300, 128)
    results = []
    for isa in alike:
        kernels.use_isa(isa)
        results.append(kernels.linear(x, kernels.pack(weight), threads=1))
    for isa, result in zip(alike, results, strict=True):
        assert torch.equal(result, results[-1]), isa


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_differs_from_float64_by_the_rounding_of_its_sums_alone(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    for n, k, group in SHAPES:
        weight = float8(n, k, group)
        wide = weight.dequantized(torch.float64)
        for m in (1, 13, 60):
            x = randn(m, k, dtype=dtype)
            exact = x.double() @ wide.T
            of_chain = x.double().abs() @ wide.abs().T * (k + 2) * 2.0**-24
            of_result = exact.abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-23)
            out = kernels.linear(x, kernels.pack(weight), threads=2)
            assert ((out.double() - exact).abs() <= of_chain + of_result + 1e-30).all(), (n, k, group, m)


@all_pairs({"isa": ISAS, "dtype": DTYPES, "rows": [1, 8, 256]})
def test_every_number_of_float8_is_multiplied_exactly(isa: str, dtype: torch.dtype, rows: int) -> None:
    kernels.use_isa(isa)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    numbers = codes.view(torch.float8_e4m3fn)
    # Each column of the weight has all numbers, each in another place.
    matrix = torch.stack([codes.roll(shift) for shift in range(64)]).view(torch.float8_e4m3fn)
    packed = kernels.pack(Float8Weight(matrix, torch.full((64, 2), 0.5), 128))
    ones = torch.eye(256, dtype=dtype)
    out = torch.cat([kernels.linear(ones[row : row + rows], packed, threads=1) for row in range(0, 256, rows)])
    assert torch.equal(out, matrix.to(dtype).T / 2)
    assert numbers.float().abs().max() == 448


@all_pairs({"isa": ISAS, "dtype": DTYPES, "group": [128, 640]})
def test_a_row_does_not_depend_on_its_batch_or_the_threads(isa: str, dtype: torch.dtype, group: int) -> None:
    kernels.use_isa(isa)
    x, bias = randn(60, 640, dtype=dtype), randn(200, seed=5, dtype=dtype)
    packed = kernels.pack(float8(200, 640, group))
    whole = kernels.linear(x, packed, bias, threads=1)
    for rows in range(1, 60):
        assert torch.equal(kernels.linear(x[60 - rows :], packed, bias, threads=2), whole[60 - rows :]), rows
    large, packed = randn(700, 1024, dtype=dtype), kernels.pack(float8(70, 1024, 1024 if group == 640 else group))
    results = [kernels.linear(large, packed, threads=threads) for threads in (1, 2, 5)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert torch.equal(kernels.linear(large[301:340], packed, threads=2), results[0][301:340])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [96, 101])
def test_rows_of_x_may_have_a_stride(dtype: torch.dtype, k: int) -> None:
    part, packed = randn(40, 300, dtype=dtype)[:, 30 : 30 + k], kernels.pack(float8(70, k, 64))
    assert torch.equal(kernels.linear(part, packed, threads=2), kernels.linear(part.contiguous(), packed, threads=1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite_stay_in_their_row(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    packed = kernels.pack(float8(70, 256, 128))
    x = randn(20, 256, dtype=dtype)
    clean = kernels.linear(x, packed, threads=1)
    x[7, 3] = float("nan")
    out = kernels.linear(x, packed, threads=1)
    assert out[7].isnan().all()
    assert torch.equal(torch.cat([out[:7], out[8:]]), torch.cat([clean[:7], clean[8:]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_empty_inputs_are_empty(dtype: torch.dtype) -> None:
    packed = kernels.pack(float8(70, 96, 96))
    assert kernels.linear(randn(0, 96, dtype=dtype), packed, threads=1).shape == (0, 70)
    bias = randn(5, dtype=dtype)
    nothing = Float8Weight(torch.empty(5, 0, dtype=torch.float8_e4m3fn), torch.empty(5, 0), 128)
    assert torch.equal(
        kernels.linear(randn(3, 0, dtype=dtype), kernels.pack(nothing), bias, threads=1), bias.expand(3, 5)
    )


@pytest.mark.parametrize("isa", range(library().functions.baton_num_isas() if kernels.available() else 0))
def test_packed_codes_are_in_the_order_of_packed_bfloat16(monkeypatch: pytest.MonkeyPatch, isa: int) -> None:
    """Packing takes no instruction set, so this also holds for those that the processor lacks."""
    monkeypatch.setattr(library(), "isa", isa)
    weight = float8(70, 160, 160)
    plain, packed = kernels.pack(weight.codes.bfloat16()), kernels.pack(weight)
    assert isinstance(plain, PackedWeight)
    assert isinstance(packed, PackedFloat8Weight)
    codes = packed.storage.view(2, -1)[:, 64 * 4 :].reshape(-1, 4, 2, 8)
    in_order = codes.transpose(1, 2).reshape(-1).view(torch.float8_e4m3fn)
    assert torch.equal(in_order.bfloat16(), plain.storage)
    assert torch.equal(kernels.take_rows(packed, torch.arange(70), torch.float32), weight.dequantized())


@pytest.mark.parametrize(("group", "bits"), [(128, 8.25), (1024, 8 + 32 / 1024)])
def test_a_packed_weight_takes_eight_bits_and_its_scales(group: int, bits: float) -> None:
    packed = kernels.pack(float8(640, 1024, group))
    assert isinstance(packed, PackedFloat8Weight)
    assert packed.storage.numel() * 8 == bits * 640 * 1024


# Stacked and gated weights


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_several_kinds_are_their_products_side_by_side(dtype: torch.dtype) -> None:
    x = randn(9, 256, dtype=dtype)
    blocks, plain = float8(70, 256, 128), randn(11, 256, seed=8, dtype=dtype)
    weights: list[Weight] = [blocks, float8(33, 256, 128, 5), float8(20, 256, 256), integers(16, 256), plain]
    together = kernels.pack(*weights)
    assert isinstance(together, kernels.StackedWeight)
    assert [part.n for part in together.parts] == [103, 20, 16, 11]
    bias = randn(150, seed=7, dtype=dtype)
    alone = [
        kernels.linear(x, kernels.pack(weight), part, threads=1)
        for weight, part in zip(weights, torch.split(bias, [70, 33, 20, 16, 11]), strict=True)
    ]
    assert torch.equal(kernels.linear(x, together, bias, threads=2), torch.cat(alone, dim=1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_taken_rows_are_those_of_the_dequantised_weight(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    for n, k, group in SHAPES:
        weight = float8(n, k, group)
        taken = kernels.take_rows(kernels.pack(weight), torch.arange(n), dtype, threads=2)
        assert torch.equal(taken, weight.dequantized(dtype)), (n, k, group)


@all_pairs(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "activation": ["silu", "gelu", "gelu_tanh"],
        "groups": [(128, 128), (320, 128), (192, 128)],
    }
)
def test_a_gated_product_is_the_activation_of_one_times_the_other(
    isa: str, dtype: torch.dtype, activation: Activation, groups: tuple[int, int]
) -> None:
    kernels.use_isa(isa)
    x = randn(60, 320, dtype=dtype) / 100
    gate, up = float8(33, 320, groups[0]), float8(33, 320, groups[1], 5)
    packed = kernels.pack_gated(gate, up)
    out = kernels.gated_linear(x, packed, activation=activation, threads=2)
    assert out.dtype == dtype
    sums = [x.double() @ weight.dequantized(torch.float64).T for weight in (gate, up)]
    expected = activated(sums[0], activation) * sums[1]
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < (2.2e-3 if dtype == torch.bfloat16 else 2e-6)
    for row in (0, 59):
        alone = kernels.gated_linear(x[row : row + 1], packed, activation=activation, threads=1)
        assert torch.equal(alone[0], out[row])


def test_smaller_groups_mean_the_same_weight() -> None:
    for group, smaller in ((300, 128), (192, 64), (128, 32)):
        weight = float8(7, 300, group)
        assert torch.equal(weight.in_groups(smaller).dequantized(), weight.dequantized())


# Programs


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_program_computes_what_single_calls_do(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    program, stacked = Program(dtype, 2), kernels.pack(float8(70, 256, 128), integers(69, 256))
    gated = kernels.pack_gated(float8(64, 256, 128), float8(64, 256, 128, 5))
    down = kernels.pack(float8(256, 64, 64))
    bias = randn(139, seed=2, dtype=dtype)
    x, out, sampled_out = program.argument(256), program.argument(139), program.argument(256, sampled=True)
    program.linear(x, stacked, bias, into=out)
    inner = program.gated_linear(x, gated, "silu", into="inner")
    program.linear(program.take_sampled(inner, into="sampled"), down, None, into=sampled_out)
    for rows in (1, 3, 70, 2):
        step, sampled = randn(rows, 256, seed=rows, dtype=dtype), torch.arange(rows - 1, -1, -2)
        results = torch.empty(rows, 139, dtype=dtype), torch.empty(len(sampled), 256, dtype=dtype)
        program.run([step, *results], one_request(rows), sampled)
        assert torch.equal(results[0], kernels.linear(step, stacked, bias, threads=1))
        inner_rows = kernels.gated_linear(step, gated, activation="silu", threads=1)[sampled]
        assert torch.equal(results[1], kernels.linear(inner_rows, down, threads=1))
    with pytest.raises(KernelArgumentError, match="100 columns, the packed weight 128"):
        program.linear(program.argument(100), kernels.pack(float8(70, 100, 100)), None, into="wrong")


# The other operations


@pytest.mark.parametrize("operations", [TorchOperations(1), reference])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_operations_compute_the_same(operations: TorchOperations | ModuleType, dtype: torch.dtype) -> None:
    x, bias, index = randn(21, 256, dtype=dtype), randn(103, seed=2, dtype=dtype), torch.tensor([3, 102, 71])
    weights = float8(70, 256, 128), float8(33, 256, 256)
    packed, ours = operations.pack(*weights), kernels.pack(*weights)
    relative, absolute = (1.6e-2 if dtype == torch.bfloat16 else 1e-4), 1e-2
    torch.testing.assert_close(
        operations.linear(x, packed, bias), kernels.linear(x, ours, bias, threads=1), rtol=relative, atol=absolute
    )
    assert torch.equal(operations.take_rows(packed, index, dtype), kernels.take_rows(ours, index, dtype))
    gate, up = float8(33, 256, 128), float8(33, 256, 128, 9)
    x = x / 1000
    out = operations.gated_linear(x, operations.pack_gated(gate, up), activation="silu")
    expected = kernels.gated_linear(x, kernels.pack_gated(gate, up), activation="silu", threads=1)
    torch.testing.assert_close(out, expected, rtol=relative, atol=absolute)
    exact = x.double() @ gate.dequantized(torch.float64).T
    torch.testing.assert_close(float8_product(x, gate).double(), exact, rtol=1e-4, atol=1e-4)


# Refused arguments


def test_weights_that_can_not_be_packed_are_refused_by_name() -> None:
    good = float8(8, 256, 128)
    for weight, message in (
        (replace(good, codes=good.codes.float()), "codes"),
        (replace(good, group=0), "--dequantize"),
        (replace(good, group=100, scales=randn(8, 3)), "--dequantize"),
        (replace(good, scales=good.scales.bfloat16()), "scales"),
        (replace(good, scales=good.scales[:, :1]), "scales"),
        (replace(good, scales=good.scales[:7]), "scales"),
    ):
        with pytest.raises(KernelArgumentError, match=message):
            kernels.pack(weight)
    with pytest.raises(BatonError, match="--dequantize"):
        TorchOperations(1).pack(replace(good, group=100, scales=randn(8, 3)))
    with pytest.raises(KernelArgumentError, match="unlike the first"):
        kernels.pack(good, float8(8, 96, 96))
    with pytest.raises(KernelArgumentError, match="up"):
        kernels.pack_gated(good, float8(9, 256, 128))
    for other in (randn(8, 256), integers(8, 256)):
        with pytest.raises(KernelArgumentError, match="up: must be of the gate's kind"):
            kernels.pack_gated(good, other)


def test_products_with_weights_in_float8_refuse_what_does_not_fit() -> None:
    packed = kernels.pack(float8(6, 64, 64))
    gated = kernels.pack_gated(float8(6, 64, 64), float8(6, 64, 64))
    wrong: list[tuple[torch.Tensor, Packed, torch.Tensor | None, str]] = [
        *((x, packed, bias, argument) for x, bias, argument in misfits()),
        (randn(2, 64), gated, None, "w"),
    ]
    for x, weight, bias, argument in wrong:
        with pytest.raises(KernelArgumentError) as error:
            kernels.linear(x, weight, bias, threads=1)
        assert error.value.argument == argument
    with pytest.raises(KernelArgumentError, match="gated"):
        kernels.gated_linear(randn(2, 64), packed, activation="silu", threads=1)
    for index in (-1, 6):
        with pytest.raises(KernelArgumentError, match="index"):
            kernels.take_rows(packed, torch.tensor([index]), torch.float32)
    with pytest.raises(KernelArgumentError, match="dtype"):
        kernels.take_rows(packed, torch.tensor([0]))
    with pytest.raises(KernelArgumentError, match="gated"):
        kernels.take_rows(gated, torch.tensor([0]), torch.float32)

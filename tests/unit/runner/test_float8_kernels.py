"""Products of weights in float8: the bits of plain products with the widened weight.

What products of all kinds of weights keep is in `test_products.py`.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from baton.errors import BatonError
from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError, PackedFloat8Weight, PackedWeight, Program
from baton.runner.backends.cpu.kernels.library import library
from baton.runner.backends.quantized_product import float8_product
from baton.runner.backends.quantized_weight import Float8Weight
from baton.runner.backends.torch_operations import TorchOperations
from tests.support import reference_operations as reference
from tests.support.kernel_inputs import DTYPES, FLOAT8_SHAPES, float8, one_request, randn
from tests.support.pairs import all_pairs

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

ISAS = kernels.available().isas


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
    for n, k, group in FLOAT8_SHAPES:
        weight = float8(n, k, group)
        packed = kernels.pack(weight)
        for m in (1, 3, 7, 13, 60):
            x = randn(m, k, seed=m, dtype=dtype) * 5
            out = kernels.linear(x, packed, threads=2)
            assert out.dtype == dtype
            assert torch.equal(out, plainly(x, weight).to(dtype)), (n, k, group, m)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_without_inputs_is_its_bias(dtype: torch.dtype) -> None:
    nothing, bias = (
        Float8Weight(torch.empty(5, 0, dtype=torch.float8_e4m3fn), torch.empty(5, 0), 128),
        randn(5).to(dtype),
    )
    out = kernels.linear(randn(3, 0, dtype=dtype), kernels.pack(nothing), bias, threads=1)
    assert torch.equal(out, bias.expand(3, 5))


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


def test_smaller_groups_mean_the_same_weight() -> None:
    for group, smaller in ((300, 128), (192, 64), (128, 32)):
        weight = float8(7, 300, group)
        assert torch.equal(weight.in_groups(smaller).dequantized(), weight.dequantized())


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_pad_rows_as_single_calls_do(dtype: torch.dtype) -> None:
    program, packed, x = Program(dtype, 2), kernels.pack(float8(70, 100, 100)), randn(9, 100, dtype=dtype)
    program.linear(program.argument(100), packed, None, into=program.argument(70))
    out = torch.empty(9, 70, dtype=dtype)
    program.run([x, out], one_request(9), torch.tensor([8]))
    assert torch.equal(out, kernels.linear(x, packed, threads=1))

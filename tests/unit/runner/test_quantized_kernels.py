"""Products of quantised weights against float64, and the same bits on every instruction set as in plain torch.

What products of all kinds of weights keep is in `test_products.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError
from baton.runner.backends.quantized_product import quantize_rows, quantized_product
from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.backends.torch_operations import TorchOperations
from tests.support import reference_operations as reference
from tests.support.kernel_inputs import (
    DTYPES,
    INTEGER_KINDS,
    INTEGER_SHAPES,
    constant_zero,
    mixed_integers,
    nested,
    randn,
    with_offsets,
)
from tests.support.pairs import all_pairs

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

ISAS = kernels.available().isas


def error_bound(x: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
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


@all_pairs({"isa": ISAS, "dtype": DTYPES, "bits": [4, 5, 6, 8], "kind": INTEGER_KINDS})
def test_a_product_differs_from_float64_by_the_rounding_of_x_alone(
    isa: str, dtype: torch.dtype, bits: int, kind: Callable[..., QuantizedWeight]
) -> None:
    kernels.use_isa(isa)
    for n, k, group in INTEGER_SHAPES:
        weight = kind(n, k, bits, group)
        for m in (1, 3, 13):
            x = randn(m, k, dtype=dtype) * torch.linspace(0.1, 10, k).to(dtype)
            out = kernels.linear(x, kernels.pack(weight), threads=2)
            assert out.dtype == dtype
            expected = x.double() @ weight.dequantized(torch.float64).T
            assert ((out.double() - expected).abs() <= error_bound(x, weight, dtype)).all(), (n, k, group, m)


@all_pairs({"dtype": DTYPES, "bits": [4, 5, 6, 8], "kind": INTEGER_KINDS})
def test_every_instruction_set_gives_the_bits_of_the_plain_product(
    dtype: torch.dtype, bits: int, kind: Callable[..., QuantizedWeight]
) -> None:
    for n, k, group in INTEGER_SHAPES:
        weight = kind(n, k, bits, group)
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


def test_a_packed_weight_is_as_small_as_its_format() -> None:
    q4_0, q4_k = constant_zero(640, 1024, 4, 32), nested(640, 1024, 4, 32)
    for weight, bits in ((q4_0, 4.5), (q4_k, 4 + 16 / 32 + 32 / 256), (constant_zero(640, 1024, 8, 32), 8.5)):
        packed = kernels.pack(weight)
        assert isinstance(packed, kernels.PackedQuantizedWeight)
        assert packed.storage.numel() * 8 == bits * 640 * 1024


@pytest.mark.parametrize("operations", [TorchOperations(1), reference])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_operations_compute_the_same(operations: TorchOperations | ModuleType, dtype: torch.dtype) -> None:
    x, bias = randn(21, 96, dtype=dtype), randn(139, seed=2, dtype=dtype)
    mixed, index = mixed_integers(), torch.tensor([3, 138, 71])
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


def test_arguments_of_stacked_weights_are_those_of_all_parts() -> None:
    stacked = kernels.pack(constant_zero(6, 64, 4, 32), nested(5, 64, 8, 32))
    with pytest.raises(KernelArgumentError, match="bias"):
        kernels.linear(randn(2, 64), stacked, randn(6), threads=1)
    with pytest.raises(KernelArgumentError, match="gated"):
        kernels.gated_linear(randn(2, 64), stacked, activation="silu", threads=1)
    for index in (-1, 11):
        with pytest.raises(KernelArgumentError, match="index"):
            kernels.take_rows(stacked, torch.tensor([index]), torch.float32)
    with pytest.raises(KernelArgumentError, match="dtype"):
        kernels.take_rows(stacked, torch.tensor([0]))

"""Products of plain weights, norms and rotations against float64; a row's bits depend on the row alone.

What products of all kinds of weights keep is in `test_products.py`.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError, KernelsUnavailable, Packed
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cpu.kernels.rows import Xielu
from tests.support.kernel_inputs import DTYPES, activated, randn, relative_error
from tests.support.pairs import all_pairs

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

ISAS = kernels.available().isas
SAME_BITS = [isa for isa in ISAS if isa != "amx_bf16"]
ACTIVATIONS: list[Activation] = ["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.2e-3}


def linear(x: torch.Tensor, w: Packed, bias: torch.Tensor | None = None, threads: int = 2) -> torch.Tensor:
    return kernels.linear(x, w, bias, threads=threads)


# Products


@all_pairs(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "m, n, k": [(1, 64, 64), (3, 1, 1), (13, 70, 33), (29, 130, 96), (2, 17, 501), (70, 40, 129)],
    }
)
def test_linear_equals_the_product_in_float64(isa: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    kernels.use_isa(isa)
    x, weight, bias = randn(m, k, dtype=dtype), randn(n, k, seed=1, dtype=dtype), randn(n, seed=2, dtype=dtype)
    packed = kernels.pack(weight)
    expected = x.double() @ weight.double().T
    for added in (None, bias):
        out = linear(x, packed, added)
        assert out.dtype == dtype
        assert relative_error(out, expected if added is None else expected + added.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("m", [1, 13, 70])
def test_a_float32_result_of_bfloat16_operands_is_what_is_rounded_otherwise(isa: str, m: int) -> None:
    kernels.use_isa(isa)
    x, weight, bias = (randn(*shape, dtype=torch.bfloat16) for shape in ((m, 129), (70, 129), (70,)))
    packed = kernels.pack(weight)
    sums = kernels.linear(x, packed, bias, out_dtype=torch.float32, threads=2)
    assert sums.dtype == torch.float32
    assert torch.equal(sums.bfloat16(), linear(x, packed, bias))
    assert relative_error(sums, x.double() @ weight.double().T + bias.double()) < 2e-6
    with pytest.raises(KernelArgumentError, match="out_dtype"):
        kernels.linear(x, packed, out_dtype=torch.float16, threads=1)
    with pytest.raises(KernelArgumentError, match="out_dtype"):
        kernels.linear(x.float(), kernels.pack(weight.float()), out_dtype=torch.bfloat16, threads=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=8)
@given(n=st.integers(1, 200), k=st.integers(1, 300), m=st.integers(1, 40), data=st.data())
def test_a_row_of_linear_does_not_depend_on_its_batch(
    isa: str, dtype: torch.dtype, n: int, k: int, m: int, data: st.DataObject
) -> None:
    kernels.use_isa(isa)
    x, weight, bias = randn(m, k, dtype=dtype), randn(n, k, seed=1, dtype=dtype), randn(n, seed=2, dtype=dtype)
    packed = kernels.pack(weight)
    whole = linear(x, packed, bias)
    start = data.draw(st.integers(0, m - 1))
    end = data.draw(st.integers(start + 1, m))
    assert torch.equal(linear(x[start:end].clone(), packed, bias), whole[start:end])
    row = data.draw(st.integers(0, m - 1))
    assert torch.equal(linear(x[row : row + 1].clone(), packed, bias), whole[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_agree_in_every_bit(dtype: torch.dtype) -> None:
    x, packed = randn(20, 331, dtype=dtype), kernels.pack(randn(70, 331, seed=1, dtype=dtype))
    gated = kernels.pack_gated(randn(70, 331, seed=2, dtype=dtype), randn(70, 331, seed=3, dtype=dtype))
    results = []
    for isa in SAME_BITS:
        kernels.use_isa(isa)
        gates = [kernels.gated_linear(x, gated, activation=activation, threads=1) for activation in ACTIVATIONS]
        turned = x.view(20, 1, 331).clone()
        kernels.rotate(turned, x[:, :90].contiguous(), x[:, 90:180].contiguous(), threads=1)
        normed = kernels.rms_norm(x, x[0], 1e-6, threads=1)
        around = kernels.layer_norm(x, x[0], x[1], 1e-6, threads=1)
        results.append([linear(x, packed), *gates, turned, normed, around])
    for isa, result in zip(SAME_BITS, results, strict=True):
        for mine, other in zip(result, results[-1], strict=True):
            assert torch.equal(mine, other), isa


def test_the_fingerprint_differs_between_orders_of_summation() -> None:
    numerics = {}
    for isa in ISAS:
        kernels.use_isa(isa)
        numerics[isa] = kernels.available().numerics
    assert len({numerics[isa] for isa in SAME_BITS}) == 1
    assert len(set(numerics.values())) == (2 if "amx_bf16" in ISAS else 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0)])
def test_products_of_empty_inputs_are_empty(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    bias = randn(n, dtype=dtype)
    out = linear(randn(m, k, dtype=dtype), kernels.pack(randn(n, k, dtype=dtype)), bias)
    assert torch.equal(out, bias.expand(m, n))


def test_the_callers_handling_of_subnormals_is_unchanged() -> None:
    """The kernels flush subnormals to zero; the calling thread's arithmetic must not change."""
    tiny = torch.full((1, 1), 1e-40)
    assert not linear(tiny, kernels.pack(torch.ones(1, 1))).any()
    assert (tiny * 1.0).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_numbers_of_any_size(activation: Activation) -> None:
    x = torch.linspace(-100, 100, 4001)[:, None]
    packed = kernels.pack_gated(torch.ones(1, 1), torch.ones(1, 1))
    out = kernels.gated_linear(x, packed, activation=activation, threads=1)
    expected = activated(x.double(), activation) * x.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=3e-6)
    nan = kernels.gated_linear(torch.tensor([[float("nan")]]), packed, activation=activation, threads=1)
    assert nan.isnan().all()
    assert torch.equal(
        kernels.activate(x, activation, threads=2), kernels.activate(x.view(1, -1), activation, threads=1).T
    )
    torch.testing.assert_close(
        kernels.activate(x, activation, threads=1).double(), activated(x.double(), activation), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(("near", "atol"), [(-1e-6, 1e-13), (-0.5, 1e-7)])
def test_xielu_of_numbers_of_any_size(near: float, atol: float) -> None:
    """Near 0, too, where e^x - 1 - x is a difference of nearly equal numbers."""
    xielu = Xielu(0.7, 2.5, 0.0, near)
    x = torch.cat((torch.linspace(-100, 100, 4001), -torch.logspace(-5, 0, 99), torch.zeros(1)))[:, None]
    out, expected = kernels.activate(x, xielu, threads=2), xielu.of(x.double())
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=atol)
    assert torch.equal(out, kernels.activate(x.view(1, -1), xielu, threads=1).T)
    assert kernels.activate(torch.tensor([[float("nan")]]), xielu, threads=1).isnan().all()


# Norms and rotations


@all_pairs(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "shape": [(2, 1), (7, 33), (40, 896), (300, 130), (5, 3, 64), (16,)],
        "plus_one": [False, True],
    }
)
def test_rms_norm_is_the_norm(isa: str, dtype: torch.dtype, shape: tuple[int, ...], plus_one: bool) -> None:
    kernels.use_isa(isa)
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], seed=1, dtype=dtype)
    wide = x.double()
    normal = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = normal * (1 + weight.double()) if plus_one else normal.to(dtype).double() * weight.double()
    out = kernels.rms_norm(x, weight, 1e-5, plus_one=plus_one, threads=2)
    assert out.dtype == dtype
    assert relative_error(out, expected) < 2 * TOLERANCE[dtype]  # a single number may round worse than many
    rows = x.reshape(-1, shape[-1])
    for row in range(min(len(rows), 40)):
        alone = kernels.rms_norm(rows[row], weight, 1e-5, plus_one=plus_one, threads=1)
        assert torch.equal(alone, out.reshape(-1, shape[-1])[row])
    total, normed = kernels.add_rms_norm(x, x.flip(0), weight, 1e-5, plus_one=plus_one, threads=2)
    assert torch.equal(total, x + x.flip(0))
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-5, plus_one=plus_one, threads=1))


@all_pairs(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "shape": [(2, 1), (7, 33), (40, 896), (300, 130), (5, 3, 64), (16,)],
        "has_bias": [False, True],
    }
)
def test_layer_norm_is_around_the_mean(isa: str, dtype: torch.dtype, shape: tuple[int, ...], has_bias: bool) -> None:
    """The means are far from zero; of rows of three dimensions each head has a weight of its own."""
    kernels.use_isa(isa)
    x, weight = (20 + randn(*shape)).to(dtype), randn(*shape[-2 if len(shape) > 2 else -1 :], seed=1, dtype=dtype)
    bias = randn(shape[-1], seed=2, dtype=dtype) if has_bias else None
    around = x.double() - x.double().mean(-1, keepdim=True)
    normal = around / (around.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = kernels.layer_norm(x, weight, bias, 1e-5, threads=2)
    assert out.dtype == dtype
    assert relative_error(out, normal if bias is None else normal + bias.double()) < 4 * TOLERANCE[dtype]
    rows = x.unsqueeze(0) if len(shape) == 1 else x
    for row in range(min(len(rows), 40)):
        alone = kernels.layer_norm(rows[row], weight, bias, 1e-5, threads=1)
        assert torch.equal(alone, out if len(shape) == 1 else out[row])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_rotation_take_parts_of_rows(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    product = randn(700, 9, 40, dtype=dtype)
    part, weight = product[:, 2:6], randn(40, seed=1, dtype=dtype)
    normed = kernels.rms_norm(part, weight, 1e-6, threads=2)
    assert torch.equal(normed, kernels.rms_norm(part.contiguous(), weight, 1e-6, threads=1))
    for turned in (part[None].transpose(1, 2), product.view(70, 10, 9, 40)[:, 3:, 2:]):
        assert torch.equal(
            kernels.rms_norm(turned, weight, 1e-6, threads=2),
            kernels.rms_norm(turned.contiguous(), weight, 1e-6, threads=1),
        )
    of_heads = randn(4, 40, seed=1, dtype=dtype)
    around = kernels.layer_norm(part, of_heads, None, 1e-6, threads=2)
    assert torch.equal(around[:, 3], kernels.layer_norm(part[:, 3].contiguous(), of_heads[3], None, 1e-6, threads=1))
    cos, sin = randn(700, 40, seed=2, dtype=dtype), randn(700, 40, seed=3, dtype=dtype)
    turned, before = part.contiguous(), product.clone()
    kernels.rotate(turned, cos, sin, threads=1)
    kernels.rotate(part, cos, sin, threads=2)
    assert torch.equal(part, turned)
    assert torch.equal(product[:, :2], before[:, :2])
    assert torch.equal(product[:, 6:], before[:, 6:])


@all_pairs({"isa": ISAS, "dtype": DTYPES, "d, r": [(64, 64), (40, 24), (16, 2), (80, 80), (8, 0)]})
def test_rotation_turns_pairs_of_halves(isa: str, dtype: torch.dtype, d: int, r: int) -> None:
    kernels.use_isa(isa)
    x, angles = randn(21, 3, d, dtype=dtype), randn(21, r // 2, seed=1)
    cos, sin = (torch.cat([part, part], dim=1).to(dtype) for part in (angles.cos(), angles.sin()))
    first, second, rest = torch.split(x.double(), [r // 2, r // 2, d - r], dim=2)
    c, s = cos.double()[:, None, : r // 2], sin.double()[:, None, : r // 2]
    expected = torch.cat([first * c - second * s, second * c + first * s, rest], dim=2)
    turned = x.clone()
    kernels.rotate(turned, cos, sin, threads=2)
    assert relative_error(turned, expected) < 2 * TOLERANCE[dtype]  # a single number may round worse than many
    assert torch.equal(turned[..., r:], x[..., r:])
    for row in range(21):
        alone = x[row : row + 1].clone()
        kernels.rotate(alone, cos[row : row + 1], sin[row : row + 1], threads=1)
        assert torch.equal(alone[0], turned[row])


# Refused arguments


def test_norms_and_rotations_refuse_what_does_not_fit() -> None:
    x, weight = randn(3, 2, 8), randn(8)
    for bad in (x.double(), x.transpose(1, 2)):
        with pytest.raises(KernelArgumentError):
            kernels.rms_norm(bad, weight, 1e-6, threads=1)
    for bad in (weight[:7], weight.bfloat16(), randn(16)[::2]):
        with pytest.raises(KernelArgumentError):
            kernels.rms_norm(x, bad, 1e-6, threads=1)
    for weight_of, bias in ((randn(3, 8), None), (weight, randn(7)), (weight, randn(2, 8))):
        with pytest.raises(KernelArgumentError):
            kernels.layer_norm(x, weight_of, bias, 1e-6, threads=1)
    for angles in (randn(2, 8), randn(3, 7), randn(3, 10), randn(3, 16)[:, ::2], randn(3, 8).bfloat16()):
        with pytest.raises(KernelArgumentError):
            kernels.rotate(x, angles, angles, threads=1)


def test_a_missing_instruction_set_is_refused() -> None:
    with pytest.raises(KernelsUnavailable, match="it has"):
        kernels.use_isa("sse9")

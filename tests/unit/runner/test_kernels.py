"""Products, norms and rotations against float64, and the promise that a row's bits depend on the row alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError, KernelsUnavailable, Packed
from baton.runner.backends.cpu.kernels.product import Activation
from tests.support.kernel_inputs import activated, randn
from tests.support.pairs import all_pairs

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

DTYPES = [torch.float32, torch.bfloat16]
ISAS = kernels.available().isas
SAME_BITS = [isa for isa in ISAS if isa != "amx_bf16"]
ACTIVATIONS: list[Activation] = ["silu", "gelu", "gelu_tanh"]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.2e-3}


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    kernels.use_isa(None)


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


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
        assert _relative_error(out, expected if added is None else expected + added.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("m", [1, 13, 70])
def test_a_float32_result_of_bfloat16_operands_is_what_is_rounded_otherwise(isa: str, m: int) -> None:
    kernels.use_isa(isa)
    x, weight, bias = (randn(*shape, dtype=torch.bfloat16) for shape in ((m, 129), (70, 129), (70,)))
    packed = kernels.pack(weight)
    sums = kernels.linear(x, packed, bias, out_dtype=torch.float32, threads=2)
    assert sums.dtype == torch.float32
    assert torch.equal(sums.bfloat16(), linear(x, packed, bias))
    assert _relative_error(sums, x.double() @ weight.double().T + bias.double()) < 2e-6
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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_count_gives_the_rows_of_the_largest(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    x, packed = randn(70, 160, dtype=dtype), kernels.pack(randn(70, 160, seed=1, dtype=dtype))
    whole = linear(x, packed)
    for rows in range(1, 40):
        assert torch.equal(linear(x[70 - rows :], packed), whole[70 - rows :]), rows


@all_pairs({"isa": ISAS, "dtype": DTYPES, "m, n, k": [(1, 900, 640), (300, 64, 640), (37, 333, 129), (900, 128, 2000)]})
def test_threads_do_not_change_a_product(isa: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    kernels.use_isa(isa)
    x, packed = randn(m, k, dtype=dtype), kernels.pack(randn(n, k, seed=1, dtype=dtype))
    results = [linear(x, packed, threads=threads) for threads in (1, 2, 5)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


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
        results.append([linear(x, packed), *gates, turned, normed])
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


@pytest.mark.parametrize("isa", ISAS)
def test_nan_stays_in_its_row(isa: str) -> None:
    kernels.use_isa(isa)
    for dtype in DTYPES:
        x = randn(20, 64, dtype=dtype)
        packed = kernels.pack(randn(70, 64, seed=1, dtype=dtype))
        clean = linear(x, packed)
        x[7, 3] = float("nan")
        out = linear(x, packed)
        assert out[7].isnan().all()
        assert torch.equal(torch.cat([out[:7], out[8:]]), torch.cat([clean[:7], clean[8:]]))


def test_the_callers_handling_of_subnormals_is_unchanged() -> None:
    """The kernels flush subnormals to zero; the calling thread's arithmetic must not change."""
    tiny = torch.full((1, 1), 1e-40)
    assert not linear(tiny, kernels.pack(torch.ones(1, 1))).any()
    assert (tiny * 1.0).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_k_do_not_change_a_sum(isa: str, dtype: torch.dtype) -> None:
    """With many rows k is cut into pieces that fit a cache, with few rows it is not cut."""
    kernels.use_isa(isa)
    x, packed = randn(1100, 901, dtype=dtype), kernels.pack(randn(66, 901, seed=1, dtype=dtype))
    whole = linear(x, packed)
    assert torch.equal(linear(x[777:778], packed), whole[777:778])
    assert torch.equal(linear(x[300:417], packed), whole[300:417])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_x_may_have_a_stride(isa: str, dtype: torch.dtype) -> None:
    kernels.use_isa(isa)
    wide = randn(40, 300, dtype=dtype)
    for k in (96, 101):
        packed = kernels.pack(randn(70, k, seed=1, dtype=dtype))
        part = wide[:, 30 : 30 + k]
        assert torch.equal(linear(part, packed), linear(part.contiguous(), packed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(70, 5, 33), (64, 64), (16, 1), (1, 1, 1)])
def test_weights_packed_together_are_their_products_side_by_side(dtype: torch.dtype, widths: tuple[int, ...]) -> None:
    x = randn(9, 45, dtype=dtype)
    weights = [randn(n, 45, seed=n + i, dtype=dtype) for i, n in enumerate(widths)]
    alone = torch.cat([linear(x, kernels.pack(weight)) for weight in weights], dim=1)
    together = kernels.pack(*weights)
    assert torch.equal(linear(x, together), alone)
    index = torch.tensor([0, sum(widths) - 1, sum(widths) // 2, 0])
    assert torch.equal(kernels.take_rows(together, index), torch.cat(weights)[index])


@all_pairs(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "activation": ACTIVATIONS,
        "m, n, k": [(1, 1, 1), (5, 33, 96), (37, 130, 45), (2, 16, 64)],
    }
)
def test_gated_linear_is_activation_times_up(
    isa: str, dtype: torch.dtype, activation: Activation, m: int, n: int, k: int
) -> None:
    kernels.use_isa(isa)
    x = randn(m, k, dtype=dtype)
    gate, up = randn(n, k, seed=1, dtype=dtype), randn(n, k, seed=2, dtype=dtype)
    packed = kernels.pack_gated(gate, up)
    out = kernels.gated_linear(x, packed, activation=activation, threads=2)
    expected = activated(x.double() @ gate.double().T, activation) * (x.double() @ up.double().T)
    assert out.dtype == dtype
    assert out.shape == (m, n)
    assert _relative_error(out, expected) < 2 * TOLERANCE[dtype]  # a single number may round worse than many
    for row in range(m):
        assert torch.equal(
            kernels.gated_linear(x[row : row + 1], packed, activation=activation, threads=1)[0], out[row]
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_numbers_of_any_size(activation: Activation) -> None:
    x = torch.linspace(-100, 100, 4001)[:, None]
    packed = kernels.pack_gated(torch.ones(1, 1), torch.ones(1, 1))
    out = kernels.gated_linear(x, packed, activation=activation, threads=1)
    expected = activated(x.double(), activation) * x.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=3e-6)
    nan = kernels.gated_linear(torch.tensor([[float("nan")]]), packed, activation=activation, threads=1)
    assert nan.isnan().all()


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
    assert _relative_error(out, expected) < 2 * TOLERANCE[dtype]  # a single number may round worse than many
    rows = x.reshape(-1, shape[-1])
    for row in range(min(len(rows), 40)):
        alone = kernels.rms_norm(rows[row], weight, 1e-5, plus_one=plus_one, threads=1)
        assert torch.equal(alone, out.reshape(-1, shape[-1])[row])
    total, normed = kernels.add_rms_norm(x, x.flip(0), weight, 1e-5, plus_one=plus_one, threads=2)
    assert torch.equal(total, x + x.flip(0))
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-5, plus_one=plus_one, threads=1))


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
    assert _relative_error(turned, expected) < 2 * TOLERANCE[dtype]  # a single number may round worse than many
    assert torch.equal(turned[..., r:], x[..., r:])
    for row in range(21):
        alone = x[row : row + 1].clone()
        kernels.rotate(alone, cos[row : row + 1], sin[row : row + 1], threads=1)
        assert torch.equal(alone[0], turned[row])


# Refused arguments


def test_products_refuse_what_does_not_fit() -> None:
    packed = kernels.pack(randn(6, 4))
    for x, bias, argument in (
        (randn(2, 5), None, "x"),
        (randn(2, 4, dtype=torch.bfloat16), None, "x"),
        (randn(4, 2).T, None, "x"),
        (randn(4)[None].expand(2, 4), None, "x"),
        (randn(4), None, "x"),
        (randn(2, 4), randn(5), "bias"),
        (randn(2, 4), randn(6, dtype=torch.bfloat16), "bias"),
    ):
        with pytest.raises(KernelArgumentError) as error:
            linear(x, packed, bias)
        assert error.value.argument == argument
    with pytest.raises(KernelArgumentError):
        kernels.pack(randn(2, 2).double())
    with pytest.raises(KernelArgumentError):
        kernels.pack(randn(2, 2), randn(2, 3))
    with pytest.raises(KernelArgumentError):
        kernels.pack_gated(randn(2, 2), randn(3, 2))
    for index in (-1, 6):
        with pytest.raises(KernelArgumentError):
            kernels.take_rows(packed, torch.tensor([0, index]))
    gated = kernels.pack_gated(randn(6, 4), randn(6, 4))
    with pytest.raises(KernelArgumentError):
        linear(randn(2, 4), gated)
    with pytest.raises(KernelArgumentError):
        kernels.take_rows(gated, torch.tensor([0]))
    with pytest.raises(KernelArgumentError):
        kernels.gated_linear(randn(2, 4), packed, activation="silu", threads=1)


def test_norms_and_rotations_refuse_what_does_not_fit() -> None:
    x, weight = randn(3, 2, 8), randn(8)
    for bad in (x.double(), x.transpose(1, 2)):
        with pytest.raises(KernelArgumentError):
            kernels.rms_norm(bad, weight, 1e-6, threads=1)
    for bad in (weight[:7], weight.bfloat16(), randn(16)[::2]):
        with pytest.raises(KernelArgumentError):
            kernels.rms_norm(x, bad, 1e-6, threads=1)
    for angles in (randn(2, 8), randn(3, 7), randn(3, 10), randn(3, 16)[:, ::2], randn(3, 8).bfloat16()):
        with pytest.raises(KernelArgumentError):
            kernels.rotate(x, angles, angles, threads=1)


def test_a_missing_instruction_set_is_refused() -> None:
    with pytest.raises(KernelsUnavailable, match="it has"):
        kernels.use_isa("sse9")

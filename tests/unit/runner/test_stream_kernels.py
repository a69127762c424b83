"""Kernels of rows in several streams have torch's bits where torch adds up in one order; others are near float64."""

from __future__ import annotations

import pytest
import torch

from baton.runner.backends import torch_states
from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError
from baton.runner.backends.cpu.kernels.product import Activation
from tests.support.kernel_inputs import DTYPES, activated, randn, relative_error
from tests.support.pairs import all_pairs

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

ISAS = kernels.available().isas
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


@all_pairs(
    {"isa": ISAS, "dtype": DTYPES, "rows, streams, n": [(1, 4, 64), (13, 4, 21), (700, 2, 33), (3, 1, 130), (40, 3, 8)]}
)
def test_streams_have_the_bits_of_torch(isa: str, dtype: torch.dtype, rows: int, streams: int, n: int) -> None:
    kernels.use_isa(isa)
    x, result = randn(rows, streams * n + 9, dtype=dtype)[:, 5 : streams * n + 5], randn(rows, n, seed=1, dtype=dtype)
    mixing = randn(rows, streams * streams, seed=2, dtype=dtype)
    correcting = randn(rows, streams + 3, seed=3, dtype=dtype)[:, 2 : streams + 2]
    plain = x.contiguous()
    mixed = kernels.mix_streams(x, mixing, threads=2)
    assert torch.equal(mixed, torch_states.mix_streams(plain, mixing))
    for active in {0, streams - 1}:
        corrected = kernels.correct_streams(x, result, correcting, active, threads=2)
        assert torch.equal(corrected, torch_states.correct_streams(plain, result, correcting, active))
    assert torch.equal(kernels.mean_of_streams(x, streams, threads=2), plain.view(rows, streams, n).mean(1))


@all_pairs({"isa": ISAS, "dtype": DTYPES, "rows, n": [(1, 64), (13, 21), (300, 130), (3, 1), (40, 2048)]})
def test_rows_are_resized_as_by_torch_with_these_means(isa: str, dtype: torch.dtype, rows: int, n: int) -> None:
    kernels.use_isa(isa)
    x, like = randn(rows, n + 7, dtype=dtype)[:, 2 : n + 2], 3 * randn(rows, n, seed=1, dtype=dtype)
    x[-1] *= 1e-4  # less than the least
    means = kernels.row_means(x, threads=2)
    assert relative_error(means, x.double().mean(-1, keepdim=True)) < 10 * TOLERANCE[dtype]  # they are near 0
    out = kernels.resize(x, like, 1e-5, threads=2)
    size, own = (kernels.row_means(part**2, threads=1) for part in (like, x))
    expected = x * torch_states.nearest_root(size) / torch_states.nearest_root(own.clamp(min=1e-5))
    assert torch.equal(out, expected)
    for row in range(min(rows, 40)):
        assert torch.equal(kernels.row_means(x[row : row + 1], threads=1)[0], means[row])
        assert torch.equal(kernels.resize(x[row : row + 1], like[row : row + 1], 1e-5, threads=1)[0], out[row])


@all_pairs(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "rows, n": [(1, 64), (13, 21), (300, 130), (3, 2), (40, 2048)],
        "activation": ["silu", "gelu_tanh", "relu"],
        "deviations": [0.0, 1.6449, -0.5],
    }
)
def test_sparse_gates_are_near_those_in_float64(
    isa: str, dtype: torch.dtype, rows: int, n: int, activation: Activation, deviations: float
) -> None:
    kernels.use_isa(isa)
    x = (20 + randn(rows, 2 * n + 5)).to(dtype)[:, 3 : 2 * n + 3]
    gate, up = x.double().chunk(2, dim=-1)
    cutoff = gate.mean(-1, keepdim=True) + deviations * gate.std(-1, keepdim=True, unbiased=False)
    out = kernels.sparse_gate(x, deviations, activation, threads=2)
    # Differences of numbers around 20 have fewer bits.
    torch.testing.assert_close(
        out.double(), activated((gate - cutoff).relu(), activation) * up, rtol=TOLERANCE[dtype], atol=2e-4
    )
    for row in range(min(rows, 40)):
        assert torch.equal(kernels.sparse_gate(x[row : row + 1], deviations, activation, threads=1)[0], out[row])


@pytest.mark.parametrize("isa", ISAS)
def test_tanh_of_numbers_of_any_size(isa: str) -> None:
    """Near 0, too, where e^2x - 1 is a difference of nearly equal numbers."""
    kernels.use_isa(isa)
    positive = torch.cat((torch.linspace(0, 100, 4001), torch.logspace(-20, 0, 999)))
    x = torch.cat((positive, -positive))[:, None]
    out = kernels.activate(x, "tanh", threads=2)
    torch.testing.assert_close(out.double(), torch.tanh(x.double()), rtol=1e-6, atol=1e-30)
    assert torch.equal(out, kernels.activate(x.view(1, -1), "tanh", threads=1).T)
    assert kernels.activate(torch.tensor([[float("nan")]]), "tanh", threads=1).isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    x, result, factors = randn(3, 32), randn(3, 8), randn(3, 4)
    for wrong in (randn(3, 15), randn(2, 16), randn(3, 16).bfloat16(), randn(3, 25), randn(3, 0), randn(16)):
        with pytest.raises(KernelArgumentError):
            kernels.mix_streams(x, wrong, threads=1)
    for wrong in (randn(3, 7), randn(2, 8), randn(3, 8).bfloat16(), randn(3, 16)[:, ::2]):
        with pytest.raises(KernelArgumentError):
            kernels.correct_streams(x, wrong, factors, 0, threads=1)
    for active in (-1, 4):
        with pytest.raises(KernelArgumentError):
            kernels.correct_streams(x, result, factors, active, threads=1)
    for streams in (0, 5):
        with pytest.raises(KernelArgumentError):
            kernels.mean_of_streams(x, streams, threads=1)
    for like in (randn(3, 31), randn(2, 32), x.bfloat16(), randn(3, 64)[:, ::2]):
        with pytest.raises(KernelArgumentError):
            kernels.resize(x, like, 1e-5, threads=1)
    for rows in (x.double(), randn(3, 64)[:, ::2], randn(8)):
        with pytest.raises(KernelArgumentError):
            kernels.row_means(rows, threads=1)
    with pytest.raises(KernelArgumentError):
        kernels.sparse_gate(randn(3, 7), 1.0, "silu", threads=1)

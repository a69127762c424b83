"""Mixtures of experts on a GPU: all at once they have the bits of each expert's products, one after the other."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.kernels import Kernels, Mixtures, Products, triton_kernels
from baton.runner.backends.device import CPU
from baton.runner.backends.routing import SharedRows, sum_of_experts
from tests.doubles.fake_attention import fake_paged_attention
from tests.support.kernel_inputs import randn
from tests.support.triton_interpreter import SMALL_TILES, triton_attention_module

pytestmark = pytest.mark.triton

EXPERTS, WIDTH, INNER, MOST = 5, 48, 24, 3
CHOSEN = [[0, 3, 4], [4, 0, 1], [3, 1, 0], [7, 0, 5], [1, 4, 0]] * 5 + [[0, 1, 3]] * 12
"""No row has chosen expert 2; 5 and 7 are beyond those that there are."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Triton's kernels; skips the test where they can't run."""
    triton_attention_module(monkeypatch)
    return triton_kernels()


@pytest.mark.parametrize(("activation", "dtype"), [("silu", torch.bfloat16), ("gelu_tanh", torch.float32)])
def test_experts_have_the_bits_that_they_have_one_by_one(kernels: Kernels, activation: Any, dtype: torch.dtype) -> None:
    operations = CudaOperations(CPU, kernels, tiles=SMALL_TILES)
    weights = randn(EXPERTS, 2 * INNER, WIDTH, seed=1, dtype=dtype), randn(EXPERTS, WIDTH, INNER, seed=2, dtype=dtype)
    ups, downs = ([operations.pack(weight) for weight in some] for some in weights)
    chosen = torch.tensor(CHOSEN, dtype=torch.int32)
    count = len(chosen)
    x, shares = randn(count, WIDTH, seed=3, dtype=dtype), randn(count, MOST, seed=4).abs()
    shared = SharedRows(randn(count, WIDTH, seed=5, dtype=dtype), randn(count, 1, seed=6, dtype=dtype))

    outs = torch.full((count, MOST, WIDTH), torch.nan, dtype=dtype)
    for expert in range(EXPERTS):
        own = operations.linear(operations.gated_linear(x, ups[expert], activation=activation), downs[expert])
        outs = torch.where((chosen == expert)[..., None], own[:, None], outs)
    places = torch.arange(count * MOST, dtype=torch.int32).view(count, MOST).where(chosen < EXPERTS, -1)

    mixture = operations.pack_mixture(ups, downs, activation)
    assert mixture is not None
    assert tuple(mixture.tiles) == SMALL_TILES
    assert torch.equal(mixture.ups, weights[0])
    for factor, added in ((1.0, None), (0.3, SharedRows(shared.rows[:1])), (1.0, shared)):
        expected = operations.sum_experts(outs.view(-1, WIDTH), places, shares, factor, added)
        assert torch.equal(operations.mix_experts(x, chosen, shares, mixture, factor, added), expected)
        by_torch = sum_of_experts(outs.view(-1, WIDTH), places, shares, factor, added)
        torch.testing.assert_close(expected, by_torch)
        if added is None or added.gate is None:
            assert torch.equal(expected, by_torch)
    # A row has the same bits alone, in whichever tile.
    lone = operations.mix_experts(x[3:4], chosen[3:4], shares[3:4], mixture)
    assert torch.equal(lone, operations.mix_experts(x, chosen, shares, mixture)[3:4])


def failing(*_: Any, **__: Any) -> torch.Tensor:
    raise NotImplementedError("no kernel image is available\nfor this device")


def test_experts_are_multiplied_one_by_one_where_the_kernel_is_of_no_use(caplog: pytest.LogCaptureFixture) -> None:
    def multiply(x: Any, weight: Any, _tile: Any, bias: Any, out_dtype: Any, activation: Any) -> torch.Tensor:
        sums = x.double() @ weight.double().T
        if activation is not None:
            gate, up = sums.chunk(2, dim=1)
            sums = torch.nn.functional.silu(gate) * up
        out: torch.Tensor = sums.to(out_dtype or x.dtype)
        return out

    kernels = Kernels(fake_paged_attention, products=Products(multiply, failing), mixtures=Mixtures(failing, failing))
    operations = CudaOperations(CPU, kernels)
    ups, downs = ([operations.pack(weight) for weight in randn(2, *shape, seed=1)] for shape in ((16, 8), (8, 8)))
    with caplog.at_level(logging.WARNING):
        assert operations.pack_mixture(ups, downs, "silu") is None
    assert "NotImplementedError (no kernel image is available)" in caplog.records[0].getMessage()

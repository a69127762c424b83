"""Norms on a GPU: what the kernel computes, that a row's bits depend on the row alone, and what is done without it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.runner.model.random_model import write_random_model
from tests.support.kernel_inputs import randn
from tests.support.load_with import load_as_on_a_gpu
from tests.support.tiny_models import TINY_MODELS
from tests.support.triton_interpreter import DEVICE, triton_attention_module

pytestmark = pytest.mark.triton

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
ROWS = (1, 2, 3, 8, 16, 17, 40, 400) if DEVICE.type == "cuda" else (1, 2, 17)
"""On a GPU torch's own mean has other bits with 1, 2, 4, 8 and 16 rows."""
WIDTHS = (16, 80, 255, 256, 896, 2048, 5120)


@pytest.fixture
def norm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel, on DEVICE; skips the test where it can't run."""
    triton_attention_module(monkeypatch)
    from baton.runner.backends.cuda.triton_norm import triton_norm

    return triton_norm


def expected(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
    wide = x.double()
    normal = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    if plus_one:
        return normal * (1.0 + weight.double())
    return normal.to(x.dtype).double() * weight.double()


def assert_near(actual: torch.Tensor, right: torch.Tensor) -> None:
    assert float((actual.double() - right).norm() / right.norm()) < TOLERANCE[actual.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_equal_those_in_float64(norm: Any, width: int, plus_one: bool, dtype: torch.dtype) -> None:
    x, residual = (randn(5, width, seed=seed, dtype=dtype).to(DEVICE) for seed in (0, 1))
    weight = randn(width, seed=2, dtype=dtype).to(DEVICE)
    total, out = norm(x, None, weight, 1e-5, plus_one)
    assert total is x
    assert_near(out, expected(x, weight, 1e-5, plus_one))
    total, out = norm(x, residual, weight, 1e-5, plus_one)
    assert torch.equal(total, x + residual)
    assert_near(out, expected(x + residual, weight, 1e-5, plus_one))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_among_any_number_of_rows(norm: Any, width: int, dtype: torch.dtype) -> None:
    x, residual = (randn(max(ROWS), width, seed=seed, dtype=dtype).to(DEVICE) for seed in (0, 1))
    weight = randn(width, seed=2, dtype=dtype).to(DEVICE)
    whole, total = norm(x, None, weight, 1e-6, False)[1], norm(x, residual, weight, 1e-6, False)
    for rows in ROWS:
        for start in {0, 1, max(ROWS) - rows} if rows < max(ROWS) else {0}:
            some = slice(start, start + rows)
            assert torch.equal(norm(x[some], None, weight, 1e-6, False)[1], whole[some])
            for one, other in zip(norm(x[some], residual[some], weight, 1e-6, False), total, strict=True):
                assert torch.equal(one, other[some])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_may_have_gaps(norm: Any, dtype: torch.dtype) -> None:
    """Queries and keys of heads lie beside each other in one product."""
    both, weight = randn(7, 6, 48, seed=0, dtype=dtype).to(DEVICE), randn(48, seed=1, dtype=dtype).to(DEVICE)
    for heads in (slice(0, 4), slice(4, 6), slice(5, 6)):
        _, out = norm(both[:, heads], None, weight, 1e-6, False)
        assert out.is_contiguous()
        assert torch.equal(out, norm(both[:, heads].contiguous(), None, weight, 1e-6, False)[1])
        assert_near(out, expected(both[:, heads], weight, 1e-6, False))
    assert norm(both[:0], None, weight, 1e-6, False)[1].shape == (0, 6, 48)
    odd = both[0, :, ::2]
    assert torch.equal(
        norm(odd, None, weight[::2], 1e-6, False)[1], norm(odd + 0, None, weight[::2] + 0, 1e-6, False)[1]
    )


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the kernel is compiled for a GPU, and this model is on the CPU")
def test_a_model_is_bit_exact_with_the_kernel(norm: Any, tmp_path: Path) -> None:
    write_random_model(tmp_path, {**TINY_MODELS["qwen3"], "num_hidden_layers": 1}, 0)
    runner = load_as_on_a_gpu(tmp_path, norm=norm)
    assert runner.model.bit_exact
    assert "-norms-triton.1-" in runner.model.numerics


def failing(*arguments: Any) -> Any:
    raise NotImplementedError("no kernel image is available\nfor this device")


def wrong(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, plus_one: bool) -> Any:
    total = x if residual is None else x + residual
    return total, total * 2


def batch_dependent(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, plus_one: bool
) -> Any:
    total = x if residual is None else x + residual
    return total, expected(total, weight, eps, plus_one).to(x.dtype) * (1.0 + 1e-6 * x.shape[0])


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (failing, "fails with NotImplementedError (no kernel image is available)"),
        (wrong, "differs from torch's"),
        (batch_dependent, "gives a row other bits alone than in a batch"),
    ],
    ids=["none", "wrong", "batch-dependent"],
)
def test_without_a_right_kernel_torch_computes_norms_and_a_warning_says_so(
    norm: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], 0)
    with caplog.at_level(logging.WARNING):
        runner = load_as_on_a_gpu(tmp_path, norm=norm)
    assert "-norms-torch-" in runner.model.numerics
    (warning,) = (record.getMessage() for record in caplog.records if "norms" in record.getMessage())
    assert reason in warning

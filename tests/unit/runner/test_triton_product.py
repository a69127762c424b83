"""Products on a GPU: their bits are those of one chain over k, in all tiles, and tiles with other bits are left out."""

from __future__ import annotations

import itertools
import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.kernels import Kernels, Products
from baton.runner.backends.cuda.product_tiles import TILES, WIDE_TILES, Tile, fastest_tile, tiles_of
from baton.runner.backends.cuda.products import ProductsFail, TiledProducts
from baton.runner.backends.device import CPU
from baton.runner.backends.low_rank import RowAdapters
from tests.doubles.fake_attention import fake_paged_attention
from tests.support.kernel_inputs import randn
from tests.support.triton_interpreter import DEVICE, SMALL_TILES, triton_attention_module

pytestmark = pytest.mark.triton

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
TILES_HERE = TILES if DEVICE.type == "cuda" else SMALL_TILES


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the kernel; skips the test where it can't run."""
    triton_attention_module(monkeypatch)
    from baton.runner.backends.cuda import triton_product

    return triton_product


def chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The float32 product as one chain over k, which is what the interpreter's dot is."""
    total = np.zeros((x.shape[0], weight.shape[0]), dtype=np.float32)
    rows, columns = x.float().cpu().numpy(), weight.float().cpu().numpy()
    for place in range(x.shape[1]):
        total += rows[:, place, None] * columns[None, :, place]
    return torch.from_numpy(total)


def gated(sums: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The gated product of float32 sums, in the kernel's steps."""
    gate, up = (part.numpy() for part in sums.chunk(2, dim=1))
    one, two, half = np.float32(1), np.float32(2), np.float32(0.5)
    if activation == "silu":
        own = gate / (one + np.exp(-gate))
    elif activation == "gelu_tanh":
        cubic = np.float32(0.044715) * gate * gate * gate
        own = half * gate * (two - two / (one + np.exp(np.float32(1.5957691216057308) * (gate + cubic))))
    else:
        own = np.where(gate < 0, np.float32(0), gate)
        own = own * gate if activation == "relu_squared" else own
    return torch.from_numpy(own * up)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the twin has the interpreter's arithmetic")
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "width", "has_bias", "activation"),
    [
        (1, 40, 64, False, None),
        (33, 17, 40, True, None),
        (17, 33, 96, False, "silu"),
        (3, 20, 33, False, "gelu_tanh"),
        (2, 16, 16, False, "relu_squared"),
    ],
)
def test_every_tile_has_the_bits_of_one_chain(
    kernel: Any, rows: int, columns: int, width: int, has_bias: bool, activation: Activation | None, dtype: torch.dtype
) -> None:
    parts = 2 if activation else 1
    x, weight = randn(rows, width, seed=1, dtype=dtype), randn(parts * columns, width, seed=2, dtype=dtype)
    bias = randn(columns, seed=3, dtype=dtype) if has_bias else None
    sums = chain(x, weight)
    expected = gated(sums, activation) if activation else sums if bias is None else sums + bias.float()
    for tile, out_dtype in itertools.product(SMALL_TILES, {dtype, FLOAT32}):
        out = kernel.triton_product(x, weight, tile, bias, out_dtype, activation)
        assert torch.equal(out, expected.to(out_dtype)), tile
    # Rows and weights may have gaps, and a rank has some of the columns.
    gaps = torch.cat([x, x], dim=1)[:, :width]
    own = weight if activation else weight[columns // 2 :]
    out = kernel.triton_product(
        gaps, own, SMALL_TILES[0], None if bias is None else bias[columns // 2 :], None, activation
    )
    assert torch.equal(out, expected[:, -out.shape[1] :].to(dtype))
    assert kernel.triton_product(x[:0], weight, SMALL_TILES[0]).shape == (0, parts * columns)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_rows_of_a_batch_with_adapters_have_the_bits_of_one_without(kernel: Any, activation: Activation) -> None:
    kernels = Kernels(fake_paged_attention, products=Products(kernel.triton_product, kernel.triton_gate))
    operations = CudaOperations(CPU, kernels, tiles=SMALL_TILES)
    x, weight = randn(3, 32, seed=1, dtype=BFLOAT16), operations.pack_gated(*randn(2, 24, 32, seed=2, dtype=BFLOAT16))
    nobody = RowAdapters(torch.full((3,), -1), [None])
    expected = operations.gated_linear(x, weight, activation=activation)
    assert torch.equal(operations.gated_linear(x, weight, activation=activation, adapters=nobody), expected)
    assert operations.why_products_by_torch == ""


def by_torch(x: Any, weight: Any, tile: Tile, bias: Any, out_dtype: Any, activation: Any) -> torch.Tensor:
    """A fake kernel: exact, and so with the same bits in all tiles."""
    out: torch.Tensor = (x.double() @ weight.double().T).to(out_dtype or x.dtype)
    return out


def off_in_tiles_of(rows: int, x: Any, weight: Any, tile: Tile, *rest: Any) -> torch.Tensor:
    out = by_torch(x, weight, tile, *rest)
    return out + 1e-3 if tile.rows == rows else out


def test_tiles_with_other_bits_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    x, weight = randn(100, 48, seed=1), randn(30, 48, seed=2)
    products = TiledProducts(CPU, partial(off_in_tiles_of, 64))
    with caplog.at_level(logging.WARNING):
        out = products(x, weight)
    assert torch.equal(out, by_torch(x, weight, WIDE_TILES[0], None, None, None))
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "not computed in tiles of (64, 64" in warning


def wrong(*arguments: Any) -> torch.Tensor:
    return by_torch(*arguments) * 1.5


def batch_dependent(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return by_torch(x, *rest) * (1.0 + 1e-6 * x.shape[0])


def failing(*_: Any) -> torch.Tensor:
    raise RuntimeError("out of shared memory\nby much")


@pytest.mark.parametrize(
    ("multiply", "reason"),
    [
        (wrong, "differs from that of float64"),
        (batch_dependent, "other bits alone than in a batch"),
        (failing, "fails with RuntimeError (out of shared memory)"),
    ],
)
def test_torch_computes_products_where_the_kernel_is_of_no_use(multiply: Any, reason: str) -> None:
    with pytest.raises(ProductsFail, match="kernel"):
        TiledProducts(CPU, multiply)(randn(2, 32, seed=1), randn(8, 32, seed=2))
    operations = CudaOperations(CPU, Kernels(fake_paged_attention, products=Products(multiply, failing)))
    plain = CudaOperations(CPU, Kernels(fake_paged_attention))
    x, weight = randn(2, 32, seed=1), plain.pack(randn(8, 32, seed=2))
    assert torch.equal(operations.linear(x, weight), plain.linear(x, weight))
    assert reason in operations.why_products_by_torch


@pytest.mark.parametrize(
    ("rows", "columns", "tile"),
    [
        (1, 2048, (16, 16)),
        (16, 16384, (16, 64)),
        (64, 128256, (64, 128)),
        (128, 2048, (64, 32)),
        (512, 2048, (64, 128)),
        (2048, 16384, (128, 256)),
    ],
)
def test_few_rows_have_programs_for_all_of_a_gpu_and_many_rows_large_tiles(
    rows: int, columns: int, tile: tuple[int, int]
) -> None:
    chosen = fastest_tile(tiles_of(wide=False, gated=False), rows, columns)
    assert (chosen.rows, chosen.columns) == tile

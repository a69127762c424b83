"""Heads on a GPU: one kernel norms, rotates and stores as the operations do one after the other; a model with it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.messages.node_report import ComputePath
from baton.messages.sampling import SamplingParams
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.kernels import Heads, Kernels, triton_kernels
from baton.runner.backends.cuda.product_tiles import Tile
from baton.runner.backends.device import CPU
from baton.runner.backends.head_rows import HeadNorm, HeadRows
from baton.runner.backends.paged_cache import CacheView, write_rows
from baton.runner.backends.torch_operations import TorchOperations, rms_norm, rotate
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from tests.doubles.fake_attention import fake_paged_attention
from tests.support.count_launches import counted_launches
from tests.support.kernel_inputs import randn
from tests.support.load_with import load_with
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_models import TINY_MODELS
from tests.support.triton_interpreter import DEVICE, triton_attention_module

pytestmark = pytest.mark.triton

BLOCKS, BLOCK_SIZE, OTHERS = 6, 4, 8
"""The cache; a block has numbers of other layers, too."""
LARGE_TILE = Tile(64, 128, 64)
"""In the interpreter each program takes milliseconds, however much it computes."""
SLOTS = (3, 17, -1, 8, 0)
NORM_TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2}
"""A norm adds a head's squares in another order than torch does."""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the kernel; skips the test where it can't run."""
    triton_attention_module(monkeypatch)
    from baton.runner.backends.cuda import triton_heads

    return triton_heads


def cache_of(num_kv_heads: int, dims: tuple[int, int], dtype: torch.dtype) -> CacheView:
    keys, values = (num_kv_heads * BLOCK_SIZE * dim for dim in dims)
    stride = keys + values + OTHERS
    memory = torch.zeros(BLOCKS * stride, dtype=dtype, device=DEVICE)
    return CacheView(memory, BLOCKS, stride, OTHERS // 2, OTHERS // 2 + keys, num_kv_heads, BLOCK_SIZE, *dims)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plus_one", [None, False, True], ids=["no norms", "norms", "norms and one"])
@pytest.mark.parametrize(
    ("heads", "dims", "num_angles", "in_pairs"),
    [((4, 2), (16, 16), 16, False), ((3, 3), (24, 8), 16, True), ((2, 1), (80, 96), 0, False)],
)
def test_heads_are_those_of_one_operation_after_the_other(
    kernel: Any,
    heads: tuple[int, int],
    dims: tuple[int, int],
    num_angles: int,
    in_pairs: bool,
    plus_one: bool | None,
    dtype: torch.dtype,
) -> None:
    (queries, keys), (dim, value_dim), count = heads, dims, len(SLOTS)
    width = (queries + keys) * dim
    qkv = randn(count, width + keys * value_dim, seed=1, dtype=dtype).to(DEVICE)
    cos, sin = (randn(count, num_angles // 2, seed=seed, dtype=dtype).to(DEVICE).repeat(1, 2) for seed in (2, 3))
    slots = torch.tensor(SLOTS, device=DEVICE)
    norms = None
    if plus_one is not None:
        weights = randn(2, dim, seed=4, dtype=dtype).to(DEVICE)
        norms = HeadNorm(weights[0], 1e-5, plus_one), HeadNorm(weights[1], 1e-1, plus_one)

    def parts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows[:, :width].view(-1, queries + keys, dim), rows[:, width:].view(-1, keys, value_dim)

    x, value = parts(qkv.clone())
    split = [x[:, :queries], x[:, queries:]]
    for place, norm in enumerate(norms or ()):
        split[place] = rms_norm(split[place], norm.weight, norm.eps, norm.plus_one)
    for part in split:
        rotate(part, cos, sin, in_pairs=in_pairs)
    expected, stored, kept = cache_of(keys, dims, dtype), cache_of(keys, dims, dtype), slots >= 0
    write_rows(expected, split[1][kept], value[kept], slots[kept] // BLOCK_SIZE, slots[kept] % BLOCK_SIZE)

    whole, values = parts(qkv.clone())
    rows = HeadRows(whole, values, queries, norms, in_pairs)
    kernel.triton_heads(rows, cos, sin, stored, slots)
    tolerance = 0 if norms is None else NORM_TOLERANCE[dtype]
    torch.testing.assert_close(whole[:, :queries], split[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(stored.memory, expected.memory, rtol=0, atol=tolerance)
    # A row alone has the same bits.
    lone, lone_value = parts(qkv[1:2].clone())
    kernel.triton_heads(rows.of(lone, lone_value), cos[1:2], sin[1:2], stored, slots[1:2])
    assert torch.equal(lone[:, :queries], whole[1:2, :queries])

    if norms is None and num_angles:
        alone = x.clone()
        kernel.triton_rotate(alone[:, :queries], cos, sin, in_pairs)
        rotate(x[:, :queries], cos, sin, in_pairs=in_pairs)
        assert torch.equal(alone, x)
        kernel.triton_store(split[1], value, stored, slots)
        assert torch.equal(stored.memory, expected.memory)


def tokens_of(runner: TorchModelRunner) -> list[list[int]]:
    driver = RunnerDriver(runner)
    for name, prompt in {"one": [5, 3], "other": [(7 * i + 1) % 250 for i in range(19)]}.items():
        driver.add(name, prompt, SamplingParams(temperature=0.0, max_tokens=3))
    driver.finish(chunk=7)
    assert not any(request.failed for request in driver.requests.values())
    return [request.output for request in driver.requests.values()]


@pytest.mark.usefixtures("kernel")
def test_a_model_is_bit_exact_and_starts_few_kernels_however_many_rows_a_step_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer starts four products, two norms, one kernel of heads, and those of attention: at most 12 together."""
    write_random_model(tmp_path, {**TINY_MODELS["qwen3"], "num_hidden_layers": 1}, 0)
    operations = CudaOperations(CPU, triton_kernels(), tiles=(LARGE_TILE,))
    runner = load_with(tmp_path, dtype="float32", num_blocks=64, operations=operations)
    assert runner.model.bit_exact
    driver = RunnerDriver(runner)
    driver.add("one", [(7 * i + 1) % 250 for i in range(140)], SamplingParams(temperature=0.0, max_tokens=4))
    for share in (140, 1):
        with counted_launches(monkeypatch) as counts:
            driver.step({"one": share})
        assert (counts["_product"], counts["_norm_row"], counts["_heads"]) == (4 + 1, 2 + 1, 1)
        # Behind the layers come a norm and the head; before them the embedding and the angles, and copies to the GPU;
        # and in the last one, the rows that sample are chosen.
        others = 1 + 1 + sum(counts[name] for name in ("embedding", "index_select", "index", "to"))
        assert counts.total() - others <= 12
    assert ComputePath("products", "Triton on cpu") in runner.model.compute_paths
    assert "norms-triton.1-heads-triton.1-experts-triton.1/" in runner.model.numerics
    plain = load_with(tmp_path, dtype="float32", num_blocks=64, operations=TorchOperations(1))
    assert tokens_of(runner) == tokens_of(plain)


def wrong(rows: HeadRows, *_: Any) -> None:
    rows.queries_and_keys.mul_(2)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_pairs: bool) -> None:
    rotate(x, cos, sin, in_pairs=in_pairs)


def store(*arguments: Any) -> None:
    TorchOperations(1).store_kv(*arguments)


def failing(*_: Any) -> None:
    raise NotImplementedError("no kernel image is available\nfor this device")


def test_without_right_kernels_operations_do_it_one_after_the_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], 0)
    how = Kernels(fake_paged_attention)
    expected = tokens_of(load_with(tmp_path, dtype="float32", num_blocks=64, operations=CudaOperations(CPU, how)))
    for kernels, reason in (
        (Heads(wrong, turn, store), "the result differs from torch's"),
        (Heads(failing, turn, store), "NotImplementedError (no kernel image is available)"),
    ):
        operations = CudaOperations(CPU, replace(how, heads=kernels))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            runner = load_with(tmp_path, dtype="float32", num_blocks=64, operations=operations)
        assert tokens_of(runner) == expected
        (warning,) = (record.getMessage() for record in caplog.records if "heads" in record.getMessage())
        assert reason in warning

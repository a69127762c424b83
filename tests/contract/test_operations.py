"""Every implementation of the operations equals float64 within the rounding of its dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.runner.backends import reference
from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels.cache import CacheView
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.device import CPU
from baton.runner.backends.kernel_choice import CompiledOperations
from baton.runner.backends.operations import Activation
from baton.runner.backends.torch_operations import TorchOperations, activate
from baton.testing.fake_attention import fake_paged_attention
from tests.support.kernel_inputs import randn

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 6e-3}
LENGTHS, QUERIES, SIZE = (1, 40, 90), (1, 5, 33), 16


@pytest.fixture(params=["compiled", "torch", "gpu", "reference"])
def operations(request: pytest.FixtureRequest) -> Any:
    if request.param == "compiled" and not kernels.available():
        pytest.skip(kernels.available().reason)
    made: dict[str, Any] = {
        "compiled": CompiledOperations(2, ""),
        "torch": TorchOperations(1),
        "gpu": CudaOperations(CPU, fake_paged_attention),
        "reference": reference,
    }
    return made[request.param]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((actual.double() - expected).norm() / expected.norm()) < TOLERANCE[actual.dtype]


def test_products_equal_those_in_float64(operations: Any, dtype: torch.dtype) -> None:
    x, bias = randn(13, 96, seed=0, dtype=dtype), randn(70, seed=1, dtype=dtype)
    gate, up = (randn(70, 96, seed=seed, dtype=dtype) for seed in (2, 3))
    expected = x.double() @ gate.double().T
    assert_near(operations.linear(x, operations.pack(gate)), expected)
    assert_near(operations.linear(x, operations.pack(gate), bias), expected + bias.double())
    both = operations.pack_gated(gate, up)
    activations: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
    for activation in activations:
        gated = activate(expected, activation) * (x.double() @ up.double().T)
        assert_near(operations.gated_linear(x, both, activation=activation), gated)


def test_a_float32_product_is_as_near_whatever_the_dtype_of_its_operands(operations: Any, dtype: torch.dtype) -> None:
    """Its error is smaller by a thousand than bfloat16's rounding."""
    x, weight, bias = (randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(((13, 96), (70, 96), (70,))))
    expected = x.double() @ weight.double().T
    packed = operations.pack(weight)
    for added in (None, bias):
        out = operations.linear(x, packed, added, out_dtype=torch.float32)
        assert out.dtype == torch.float32
        exact = expected if added is None else expected + added.double()
        assert float((out.double() - exact).norm() / exact.norm()) < 3e-6
        alone = operations.linear(x[5:6].clone(), packed, added, out_dtype=torch.float32)
        assert torch.equal(alone, out[5:6]), "a row does not depend on the other rows"


def test_norms_and_rotations_equal_those_in_float64(operations: Any, dtype: torch.dtype) -> None:
    x, weight = randn(13, 96, seed=0, dtype=dtype), randn(96, seed=1, dtype=dtype)
    wide = x.double()
    normal = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_near(operations.rms_norm(x, weight, 1e-5), normal * weight.double())
    assert_near(operations.rms_norm(x, weight, 1e-5, plus_one=True), normal * (1 + weight.double()))
    half = randn(13, 16, seed=2, dtype=torch.float32)
    cos, sin = (torch.cat([part, part], dim=1).to(dtype) for part in (half.cos(), half.sin()))
    turned = x.view(13, 2, 48).clone()
    first, second, rest = turned.double().tensor_split(3, dim=2)
    c, s = cos.double()[:, None, :16], sin.double()[:, None, :16]
    operations.rotate(turned, cos, sin)
    assert_near(turned, torch.cat([first * c - second * s, second * c + first * s, rest], dim=2))


@pytest.mark.parametrize("widths", [(16, 16), (24, 16), (256, 256)])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(None, None, False), (20, None, False), (20, 5.0, False), (None, None, True)]
)
def test_attention_equals_attention_in_float64(
    operations: Any,
    dtype: torch.dtype,
    widths: tuple[int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
) -> None:
    (key_dim, value_dim), heads, kv_heads = widths, 6, 2
    width = -(-max(LENGTHS) // SIZE)
    half, stride = kv_heads * SIZE * key_dim, kv_heads * SIZE * (key_dim + value_dim)
    blocks = 1 + width * len(LENGTHS)
    memory = torch.zeros(blocks * stride, dtype=dtype)
    cache = CacheView(memory, blocks, stride, 0, half, kv_heads, SIZE, key_dim, value_dim)
    order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
    tables = order.view(len(LENGTHS), width).to(torch.int32)
    scores_of_sinks = randn(heads, seed=9, dtype=dtype) if sinks else None
    queries, expected = [], []
    for index, (length, count) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        keys, values = (randn(length, kv_heads, d, seed=10 * index + d, dtype=dtype) for d in (key_dim, value_dim))
        position = torch.arange(length)
        operations.store_kv(keys, values, cache, tables[index, position // SIZE].long() * SIZE + position % SIZE)
        query = randn(count, heads, key_dim, seed=10 * index + 1, dtype=dtype)
        queries.append(query)
        expected.append(attend(query, keys, values, window, softcap, scores_of_sinks))
    starts = torch.tensor([0, *QUERIES]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out = operations.paged_attention(
        torch.cat(queries),
        cache,
        starts,
        lengths,
        tables,
        scale=0.2,
        window=window,
        softcap=softcap,
        sinks=scores_of_sinks,
    )
    assert_near(out, torch.cat(expected))


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention in float64 of the last rows of a sequence."""
    group, length = query.shape[1] // keys.shape[1], len(keys)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys.double().repeat_interleave(group, 1)) * 0.2
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    at, key_at = torch.arange(length - len(query), length)[:, None], torch.arange(length)[None]
    seen = (key_at <= at) & (key_at > at - (window or length))
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(query), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], values.double().repeat_interleave(group, 1))

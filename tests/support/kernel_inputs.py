"""Inputs of the kernels' tests, weights of every kind, and the formulas that several of them compare with."""

from __future__ import annotations

from dataclasses import replace

import torch

from baton.runner.backends.attention_call import StepLayout
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.quantized_weight import Float8Weight, QuantizedWeight

DTYPES = (torch.float32, torch.bfloat16)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of a normal distribution, the same for the same seed and shape."""
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def rand_bytes(*shape: int, below: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=generator(seed), dtype=torch.uint8)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, as a share of what was expected."""
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def constant_zero(n: int, k: int, bits: int, group: int, seed: int = 1) -> QuantizedWeight:
    """Integers as in GGUF's Q4_0 and Q8_0: one float16 scale for each group."""
    codes, zero = rand_bytes(n, k, below=1 << bits, seed=seed), 1 << bits - 1
    return QuantizedWeight(codes, bits, group, randn(n, k // group, seed=seed + 1).half(), zeros=zero)


def own_zeros(n: int, k: int, bits: int, group: int, seed: int = 1) -> QuantizedWeight:
    """Integers as in AWQ: a zero for each group; with scales in bfloat16."""
    weight = constant_zero(n, k, bits, group, seed)
    zeros = rand_bytes(n, k // group, below=1 << bits, seed=seed + 2)
    return replace(weight, scales=weight.scales.bfloat16(), zeros=zeros)


def with_offsets(n: int, k: int, bits: int, group: int, seed: int = 1) -> QuantizedWeight:
    """Integers as in GGUF's Q4_1, with float32 numbers."""
    weight = constant_zero(n, k, bits, group, seed)
    return replace(weight, scales=weight.scales.float(), zeros=0, offsets=randn(n, k // group, seed=seed + 3))


def nested(n: int, k: int, bits: int, group: int, seed: int = 1) -> QuantizedWeight:
    """Integers as in GGUF's K formats: scales and offsets of 8 bits, and a factor for every few of them."""
    weight, groups = constant_zero(n, k, bits, group, seed), k // group
    together = max(r for r in (1, 2, 3, 8) if groups % r == 0)
    return replace(
        weight,
        scales=(rand_bytes(n, groups, below=255, seed=seed + 4).int() - 127).to(torch.int8),
        scale_factors=randn(n, groups // together, seed=seed + 5).half(),
        offsets=rand_bytes(n, groups, below=64, seed=seed + 6),
        offset_factors=randn(n, groups // together, seed=seed + 7).half(),
    )


def mixed_integers() -> tuple[QuantizedWeight, ...]:
    """Weights of three formats; the second and third can be packed together."""
    return (
        nested(70, 96, 4, 32),
        constant_zero(33, 96, 8, 16),
        constant_zero(20, 96, 8, 16, 9),
        own_zeros(16, 96, 4, 48),
    )


INTEGER_KINDS = (constant_zero, own_zeros, with_offsets, nested)
INTEGER_SHAPES = (
    (1, 4, 4),
    (70, 48, 16),
    (33, 120, 24),
    (130, 256, 32),
    (17, 320, 64),
    (65, 384, 128),
    (5, 100, 100),
    (3, 60, 20),
)
"""Numbers n, k and group of weights of integers."""


def float8(n: int, k: int, group: int, seed: int = 1) -> Float8Weight:
    """Numbers in float8 of all magnitudes, subnormal ones among them."""
    codes = rand_bytes(n, k, seed=seed)
    codes[codes & 0x7F == 0x7F] = 5
    return Float8Weight(codes.view(torch.float8_e4m3fn), randn(n, -(-k // group), seed=seed + 1), group)


FLOAT8_SHAPES = ((1, 4, 4), (70, 48, 32), (33, 120, 64), (130, 256, 128), (17, 300, 128), (65, 640, 640), (5, 33, 100))
"""Numbers n, k and group of weights in float8; a row of the last is shorter than a group."""


def misfits() -> list[tuple[torch.Tensor, torch.Tensor | None, str]]:
    """Inputs and biases that a product with a weight [6, 64] refuses, and the name of the argument that is wrong."""
    return [
        (randn(2, 60), None, "x"),
        (randn(2, 64).double(), None, "x"),
        (randn(64, 2).T, None, "x"),
        (randn(64)[None].expand(2, 64), None, "x"),
        (randn(64), None, "x"),
        (randn(2, 64), randn(5), "bias"),
        (randn(2, 64), randn(6).bfloat16(), "bias"),
    ]


def activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation, computed by torch."""
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    if activation in ("relu", "relu_squared"):
        return torch.nn.functional.relu(gate) ** (1 if activation == "relu" else 2)
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def one_request(rows: int) -> StepLayout:
    """The layout of a step with so many rows of one request, for programs without attention."""
    starts = torch.tensor([0, rows], dtype=torch.int32)
    return StepLayout(
        starts, starts[1:].clone(), [torch.zeros(1, 4, dtype=torch.int32)], [torch.arange(rows)], starts.clamp(max=1)
    )

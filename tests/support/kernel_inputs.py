"""Inputs of the kernels' tests, and the formulas that several of them compare with."""

from __future__ import annotations

import torch

from baton.runner.backends.attention_call import StepLayout
from baton.runner.backends.cpu.kernels.product import Activation


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of a normal distribution, the same for the same seed and shape."""
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


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
    """The activation of a gated product, computed by torch."""
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def one_request(rows: int) -> StepLayout:
    """The layout of a step with so many rows of one request, for programs without attention."""
    starts = torch.tensor([0, rows], dtype=torch.int32)
    return StepLayout(
        starts, starts[1:].clone(), [torch.zeros(1, 4, dtype=torch.int32)], [torch.arange(rows)], starts.clamp(max=1)
    )

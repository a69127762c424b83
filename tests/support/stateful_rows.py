"""Sequences of layers that keep a state, for the tests of `Operations.convolve` and `Operations.recur`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from baton.runner.backends.state_calls import ConvolutionCall, RecurrenceCall, StateStep, StateView
from tests.support.kernel_inputs import generator, randn

Chunk = tuple[int, int, int]
"""Some rows of a step: a sequence, the position of its first row, and that behind its last one."""

LONGEST = 160
"""The most rows of a sequence."""
GAP = 7
"""How many numbers of a block are in front of the states."""


@dataclass(kw_only=True)
class StatefulRows:
    """Sequences whose rows are known, and a cache whose blocks keep their states. Block 0 is nobody's."""

    lengths: Sequence[int]
    shape: tuple[int, ...]
    """The dimensions of a state."""
    dtype: torch.dtype = torch.float32
    block_size: int = 8
    placement: int = 0
    """Chooses the blocks."""
    seed: int = 0
    """Sequence i has the rows of seed + i."""
    view: StateView = field(init=False)
    tables: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        width = -(-max(self.lengths) // self.block_size)
        num_blocks, stride = width * len(self.lengths) + 1, GAP + math.prod(self.shape) + 3
        order = torch.randperm(num_blocks - 1, generator=generator(self.placement)) + 1
        self.tables = order.view(-1, width).to(torch.int32)
        memory = torch.full((num_blocks * stride,), float("nan"))
        self.view = StateView(memory, num_blocks, stride, GAP, self.shape, self.block_size)

    @property
    def whole(self) -> list[Chunk]:
        """All rows of all sequences."""
        return [(index, 0, length) for index, length in enumerate(self.lengths)]

    def states(self, sequence: int) -> torch.Tensor:
        """The states in the blocks of all tokens of a sequence: [stripes, *shape]."""
        stripes = -(-self.lengths[sequence] // self.block_size)
        blocks = self.view.memory.view(self.view.num_blocks, -1)[self.tables[sequence, :stripes].long()]
        size = math.prod(self.shape)
        return blocks[:, GAP : GAP + size].reshape(-1, *self.shape).clone()

    def step(self, chunks: Sequence[Chunk], drafts: int = 0) -> StateStep:
        """The step of some chunks; the last `drafts` rows of each are drafts."""
        counts = [behind - first for _, first, behind in chunks]
        lengths = torch.tensor([behind for *_, behind in chunks], dtype=torch.int32)
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        return StateStep(starts, lengths, lengths - drafts, self.tables[[index for index, *_ in chunks]])

    def rows(self, name: int, chunks: Iterable[Chunk], *width: int, padding: int = 0) -> torch.Tensor:
        """The rows of some chunks; `name`: tells rows of equal shape apart."""
        parts = [
            randn(LONGEST, *width, seed=100 * name + self.seed + index)[first:behind] for index, first, behind in chunks
        ]
        return torch.cat([*parts, torch.full((padding, *width), float("nan"))])


@dataclass(kw_only=True)
class Convolved(StatefulRows):
    """Sequences of a convolution, whose state is [K - 1, W]."""

    activation: Literal["silu"] | None = "silu"
    has_bias: bool = True

    def call(self, chunks: Sequence[Chunk], drafts: int = 0, padding: int = 0) -> ConvolutionCall:
        taps, width = self.shape[0] + 1, self.shape[1]
        return ConvolutionCall(
            self.rows(1, chunks, width, padding=padding).to(self.dtype),
            randn(width, taps, seed=2),
            randn(width, seed=3) if self.has_bias else None,
            self.activation,
            self.view,
            self.step(chunks, drafts),
        )

    def compute(self, operations: Any, chunks: Sequence[Chunk], **how: Any) -> torch.Tensor:
        out: torch.Tensor = operations.convolve(self.call(chunks, **how))
        return out


@dataclass(kw_only=True)
class Recurred(StatefulRows):
    """Sequences of a recurrence, whose state is [H, DK, DV]."""

    groups: int = 1
    decay_per_key: bool = False
    rule: Literal["delta", "factor", "plain"] = "delta"
    """What betas are for: the delta rule, or values; with the latter there is a skip. "plain": there are none."""
    norm_eps: float | None = 1e-6
    has_rates: bool = False

    def call(self, chunks: Sequence[Chunk], drafts: int = 0, padding: int = 0) -> RecurrenceCall:
        heads, key_dim, value_dim = self.shape
        unit = key_dim**-0.5 if self.norm_eps is None else 1.0  # with longer keys the delta rule's states would grow
        of_decay = (heads, key_dim) if self.decay_per_key else (heads,)
        return RecurrenceCall(
            self.rows(1, chunks, self.groups, key_dim, padding=padding).to(self.dtype),
            (unit * self.rows(2, chunks, self.groups, key_dim, padding=padding)).to(self.dtype),
            self.rows(3, chunks, heads, value_dim, padding=padding).to(self.dtype),
            -0.3 * self.rows(4, chunks, *of_decay, padding=padding).abs(),
            self.rows(5, chunks, heads, padding=padding).clamp(-2, 2) / 4 + 0.5 if self.rule != "plain" else None,
            key_dim**-0.5,
            self.norm_eps,
            self.view,
            self.step(chunks, drafts),
            self.rule == "delta",
            randn(heads, seed=6) if self.rule == "factor" else None,
            randn(key_dim, heads, seed=7).abs() if self.has_rates else None,
        )

    def compute(self, operations: Any, chunks: Sequence[Chunk], **how: Any) -> torch.Tensor:
        out: torch.Tensor = operations.recur(self.call(chunks, **how))
        return out

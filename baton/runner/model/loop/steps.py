"""The steps of a loop over layers: parts of the model that compute rows from rows, and sums and products of rows.

Rows have numbers: 0 is the input of the first layer, and every step gives rows of a new number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.model.attention import PagedAttention
from baton.runner.model.fused.low_rank import LowRankResidual, TermedMlp
from baton.runner.model.fused.rows import FusedActivation, FusedLayerNorm, FusedMlp, FusedNorm, PlainMlp, SparseMlp
from baton.runner.model.fused.streams import AlternatingUpdates, StreamCorrection, StreamPrediction
from baton.runner.model.layers import PackedLinear
from baton.runner.model.loop.stream_ends import MergedStreams, SpreadStreams
from baton.runner.model.mixtures.fused import FusedMixture
from baton.runner.model.mixtures.router import RoutedExperts

FUSED_NORMS = (FusedNorm, FusedLayerNorm)
ENDING_WITH_ROWS = (
    *(FusedActivation, LowRankResidual, AlternatingUpdates, StreamPrediction, StreamCorrection),
    *(SpreadStreams, MergedStreams),
)
"""Parts that compute each row alone, by Baton's operations, of which the last is neither a norm nor a product."""
FUSED_PARTS = (
    *(FusedMlp, SparseMlp, TermedMlp, PlainMlp, FusedMixture, RoutedExperts, PackedLinear),
    *ENDING_WITH_ROWS,
)
"""Parts that aren't norms and compute each row alone, by Baton's operations."""


@runtime_checkable
class Mixer(Protocol):
    """What stands in a layer where most models have attention: its rows depend on those of other tokens.

    A module; Baton's loop over the layers takes any that has these, under whatever name a layer has it.
    """

    layer_idx: int

    @property
    def products(self) -> Sequence[AdaptableProduct]: ...

    def rows(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K], cos and sin [T, R] to [T, K]; with `sample_rows`, which may be empty, only these rows.

        cos and sin are those that transformers' loop gives this part, [T, 0] if it gives it none.
        """
        ...

    def record(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: PagedAttention, *, sampling: bool, into: str
    ) -> Rows:
        """Append to a program what `rows` computes; with `sampling` only for the rows that sample.

        Raises KernelArgumentError for what programs have no operation for.
        """
        ...


@runtime_checkable
class Reader(Protocol):
    """A mixer that adds nothing to the cache, since another one has: behind that one, rows may be those that sample.

    A module, as a mixer is.
    """

    @property
    def products(self) -> Sequence[AdaptableProduct]: ...

    def read(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, sampling: bool) -> torch.Tensor:
        """x [T, K], cos and sin [T, R] to [T, K]; with `sampling`, T are the rows that sample."""
        ...

    def record_reading(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: PagedAttention, *, into: str
    ) -> Rows:
        """Append to a program what `read` computes. Raises KernelArgumentError for what programs can't."""
        ...


@runtime_checkable
class IsLimited(Protocol):
    """A part that programs don't compute in all steps."""

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter of the step's rows changes what programs compute without adapters."""
        ...

    @property
    def most_recorded_rows(self) -> int:
        """The most rows of a step that a program computes."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A part of the model computes rows from rows."""

    part: nn.Module
    given: int
    gives: int
    angles: int | None = None
    """The kind of the angles that a mixer or a reader takes; None: it takes none."""
    beside: int | None = None
    """Other rows that the part takes: RoutedExperts choose experts by them; None: it takes none."""

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.given,) if self.beside is None else (self.given, self.beside)


@dataclass(frozen=True, slots=True)
class Sum:
    """one + other * factor."""

    one: int
    other: int
    gives: int
    factor: float = 1.0
    is_wide: bool = False
    """Whether `one` and the sum are float32, and `other` is widened."""

    @property
    def operands(self) -> tuple[int, ...]:
        return self.one, self.other


@dataclass(frozen=True, slots=True)
class Scaled:
    """one * factor, or one / factor."""

    one: int
    gives: int
    factor: float
    divides: bool = False

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that the step gives, of the same shape."""
        return rows / self.factor if self.divides else rows * self.factor

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.one,)


@dataclass(frozen=True, slots=True)
class TimesInput:
    """one * some columns of the layers' inputs (layer_inputs.py)."""

    one: int
    columns: range
    gives: int

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.one,)


@dataclass(frozen=True, slots=True)
class Joined:
    """one and other side by side."""

    one: int
    other: int
    gives: int

    @property
    def operands(self) -> tuple[int, ...]:
        return self.one, self.other


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns of one."""

    one: int
    columns: range
    gives: int

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.one,)


@dataclass(frozen=True, slots=True)
class SumInColumns:
    """one, with other added to each piece, as wide as it is, of some columns."""

    one: int
    other: int
    columns: range
    gives: int

    @property
    def operands(self) -> tuple[int, ...]:
        return self.one, self.other


@dataclass(frozen=True, slots=True)
class Converted:
    """one in another dtype: float32, or from float32 that of most rows."""

    one: int
    gives: int
    dtype: torch.dtype

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.one,)


Step = Call | Sum | Scaled | TimesInput | Joined | Columns | SumInColumns | Converted


def needed_steps(steps: Sequence[Step], result: int) -> list[Step]:
    """The steps that the rows `result` depend on."""
    needed, kept = {result}, []
    for step in reversed(steps):
        if step.gives in needed:
            needed.update(step.operands)
            kept.append(step)
    return kept[::-1]


def parts_of(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a layer by name; of a list, and of one that has a mixer and is more than that, its parts, and of
    AlternatingUpdates both."""
    for name, part in layer.named_children():
        is_whole = isinstance(part, Mixer | Reader)
        has_mixer = any(isinstance(inner, Mixer | Reader) for inner in part.modules())
        if isinstance(part, nn.ModuleList) or (has_mixer and not is_whole):
            yield from ((f"{name}.{inner}", child) for inner, child in parts_of(part))
        else:
            yield name, part
        if isinstance(part, AlternatingUpdates):
            yield from ((f"{name}.{inner}", child) for inner, child in part.named_children())

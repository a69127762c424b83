"""One rank's part of a mixture of experts: its columns of each expert's products, and of what they are summed to.

Ranks exchange what is behind the experts' first products, and the sums. Both are columns, so the bits are those of one
process (decision 39).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.runner.backends.cpu.kernels import KernelArgumentError, Packed
from baton.runner.backends.cpu.kernels.mixture import PackedChoice
from baton.runner.backends.cpu.kernels.product import Activation, Ungated
from baton.runner.backends.routing import PLAIN_EXPERTS, ClampedGate, ExpertBiases, ExpertKind


class Columns(NamedTuple):
    """The columns that one rank has of rows."""

    own: range
    widths: tuple[int, ...]
    """How many each rank has."""

    @property
    def total(self) -> int:
        return sum(self.widths)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's columns of rows [T, `total`]."""
        return rows[:, self.own.start : self.own.stop].contiguous()

    def halved(self) -> Columns:
        """The columns of rows that have one for each two of these. Raises KernelArgumentError for a half."""
        if self.own.start % 2 or any(width % 2 for width in self.widths):
            raise KernelArgumentError("ups", "have pairs of columns that belong to two ranks")
        return Columns(range(self.own.start // 2, self.own.stop // 2), tuple(width // 2 for width in self.widths))


class OwnWeight(NamedTuple):
    """A rank's columns of a weight; the rank may have none."""

    packed: Packed | None
    columns: Columns


@dataclass(frozen=True, slots=True, eq=False)
class ShardedMixture:
    """A rank's part of all experts."""

    up: PackedChoice
    down: PackedChoice
    inner: Columns
    """The columns that this rank has of the rows between an expert's products."""
    out: Columns
    kind: ExpertKind

    @classmethod
    def of(
        cls,
        ups: Sequence[OwnWeight],
        downs: Sequence[OwnWeight],
        gate: Activation | ClampedGate | Ungated,
        biases: ExpertBiases | None = None,
        kind: ExpertKind = PLAIN_EXPERTS,
    ) -> ShardedMixture:
        """`gate`, `biases`, `kind`: as of a PackedMixture. Raises KernelArgumentError for what is not one operation.

        It does so on all ranks or none.
        """
        first, out = ups[0].columns, downs[0].columns
        inner = first.halved() if isinstance(gate, ClampedGate) else first
        if not all((*first.widths, *out.widths)):
            raise KernelArgumentError("ups", "and downs have fewer columns than there are ranks")
        of_up, of_down = (None, None) if biases is None else (first.of(biases.up), out.of(biases.down))
        is_weighed = kind.weighs_inputs
        up = PackedChoice(_packed(ups), gate, of_up, ExpertKind(weighs_inputs=is_weighed))
        behind = ExpertKind(passes_rest=kind.passes_rest)
        down = PackedChoice(_packed(downs), None, of_down, behind, are_weighted=is_weighed)
        if down.k != inner.total or up.k != out.total:
            raise KernelArgumentError("downs", f"must be [{up.k}, {inner.total}]")
        return cls(up, down, inner, out, kind)

    def joined(self, gathered: torch.Tensor, most: int) -> torch.Tensor:
        """Rows [T, most * inner] of what the ranks gave, which stands rank by rank in `gathered`."""
        parts = torch.split(gathered, [most * width for width in self.inner.widths], dim=1)
        return torch.cat([part.view(len(part), most, -1) for part in parts], dim=2).view(len(gathered), -1)


def _packed(weights: Sequence[OwnWeight]) -> list[Packed]:
    return [weight.packed for weight in weights if weight.packed is not None]

"""The packed weight of which a rank has its own columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.runner.backends.cpu.kernels import Packed


@dataclass(frozen=True, slots=True)
class ShardedWeight:
    """A rank's columns of a weight [N, K]; a weight of few columns may leave a rank none."""

    own: Packed | None
    k: int
    columns: range
    """This rank's columns."""
    widths: tuple[int, ...]
    """How many columns each rank has."""

    def own_part(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """What a bias [N] adds to this rank's columns."""
        return None if bias is None else bias[self.columns.start : self.columns.stop]

    @property
    def n(self) -> int:
        """N: the columns of all ranks."""
        return sum(self.widths)

"""The packed weight of which a rank has its own columns."""

from __future__ import annotations

from dataclasses import dataclass

from baton.runner.backends.cpu.kernels import Packed


@dataclass(frozen=True, slots=True)
class ShardedWeight:
    """A rank's columns of a weight [N, K]; a weight of few columns may leave a rank none."""

    own: Packed | None
    k: int
    columns: tuple[int, int]
    """The first of this rank's columns, and the one behind the last."""
    widths: tuple[int, ...]
    """How many columns each rank has."""

    @property
    def n(self) -> int:
        """N: the columns of all ranks."""
        return sum(self.widths)

"""A plain weight that stays in its file until it is packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WeightOnFile:
    """Some rows of a plain weight W [N, K], which are read whenever they are asked for.

    So a rank that packs its own rows of a weight never has the others in the dtype that it computes in.
    """

    source: Callable[[int, int], torch.Tensor]
    """Reads the rows `first` to before `stop` of W, in the dtype that the model computes in."""
    first: int
    stop: int
    k: int
    reads_all: bool = False
    """Whether the source makes all rows of W to give some of them."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and K."""
        return self.stop - self.first, self.k

    def rows(self, first: int, stop: int) -> WeightOnFile:
        """The rows `first` to before `stop` of these rows, unread."""
        return WeightOnFile(self.source, self.first + first, self.first + stop, self.k, self.reads_all)

    def read(self) -> torch.Tensor:
        """The rows [n, K]. They may be in the file's mapped memory."""
        return self.source(self.first, self.stop)

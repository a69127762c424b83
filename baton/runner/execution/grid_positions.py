"""Rotary positions in three dimensions (M-RoPE, arXiv 2409.12191): time, row and column of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Grid:
    """An image's tokens in a prompt: `rows` times `columns` of them from `start` on, row by row."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """The place behind the last one."""
        return self.start + self.rows * self.columns


class GridPositions:
    """The positions of one sequence's tokens, whose images lie in grids.

    A text token has one number in all dimensions. An image's tokens share the time of its first one, and text goes on
    behind the largest number of the image, so a token's position differs from its place by an offset.
    """

    def __init__(self, grids: Sequence[Grid]) -> None:
        """`grids`: in their order; they don't overlap."""
        pieces, place, offset = [], 0, 0
        for grid in grids:
            pieces.append(_text(place, grid.start, offset))
            first = grid.start + offset
            rows = np.repeat(np.arange(grid.rows), grid.columns)
            columns = np.tile(np.arange(grid.columns), grid.rows)
            pieces.append(np.stack([np.zeros_like(rows), rows, columns]) + first)
            place = grid.stop
            offset += max(grid.rows, grid.columns) - grid.rows * grid.columns
        self._known = np.concatenate([np.zeros((3, 0), dtype=np.int64), *pieces], axis=1)
        self._offset = offset

    def rows(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The positions of the tokens [start, stop): int64 [3, stop - start]."""
        known = self._known[:, start:stop]
        text = _text(max(start, self._known.shape[1]), stop, self._offset)
        return np.concatenate([known, text], axis=1) if text.shape[1] else known


def _text(start: int, stop: int, offset: int) -> npt.NDArray[np.int64]:
    return np.broadcast_to(np.arange(start, max(start, stop), dtype=np.int64) + offset, (3, max(0, stop - start)))

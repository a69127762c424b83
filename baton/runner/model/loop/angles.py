"""Cosines and sines of rotary embeddings by position, of every kind that the layers of a model take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.model.fused.rotation import Angles, Rotation, cos_and_sin, whole_angles
from baton.runner.model.long_angles import LongAngles

_PIECE = 1024


@dataclass(frozen=True, slots=True)
class AngleKind:
    """How some layers get their angles."""

    rotary: nn.Module
    arguments: Mapping[str, Any]
    """What the rotary module is told besides rows and positions: the kind of the layer, for instance."""
    rotation: Rotation
    """What the layers make of the angles (`Rotation.of_angles`); if they multiply queries by position, angles of
    queries follow those of keys."""


class RotaryTable:
    """Cosines and sines by position, computed once in pieces of _PIECE positions, so no row depends on its step."""

    def __init__(self, kind: AngleKind, like: torch.Tensor, longest: int) -> None:
        """`longest`: the most tokens of a sequence; transformers changes some angles for good in a longer call."""
        self._rotary = kind.rotary
        self._arguments = kind.arguments
        self._like = like
        self._rotation = kind.rotation
        self._longest = longest
        self._pieces: list[torch.Tensor] = []
        self._table = like
        """Cosines and sines of all pieces: [2, positions, R]."""
        self._long_pieces: list[torch.Tensor] = []
        self._long_table = like
        """The same for long sequences, of a model in which they have others."""
        self._axes: torch.Tensor | None = None
        """For each angle, int64 [R], which of a position's three numbers it follows; None while nobody asked."""

    @property
    def width(self) -> int:
        """R, the number of angles for a position."""
        return self.rows(np.zeros(1, dtype=np.int64))[0].shape[1]

    def rows(self, positions: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, R] of positions [T], or of positions in three dimensions [3, T] (M-RoPE)."""
        needed = int(positions.max(initial=0)) // _PIECE + 1
        if needed > len(self._pieces):
            self._grow(needed)
        is_long = self._rotary.is_long if isinstance(self._rotary, LongAngles) else None
        at = torch.from_numpy(positions).to(self._like.device)
        if is_long is not None:
            long, short = self._long_table.index_select(1, at), self._table.index_select(1, at)
            cos, sin = torch.where(is_long[:, None], long, short).unbind()
        elif positions.ndim == 1:
            cos, sin = self._table.index_select(1, at).unbind()
        else:
            if self._axes is None:
                self._axes = self._find_axes()
            cos, sin = self._table.gather(1, at[self._axes].T.expand(2, -1, -1)).unbind()
        return cos, sin

    def _grow(self, num_pieces: int) -> None:
        """Compute further pieces, so that there are `num_pieces`."""
        rotary = self._rotary
        for piece in range(len(self._pieces), num_pieces):
            at = torch.arange(piece * _PIECE, (piece + 1) * _PIECE, device=self._like.device)[None]
            at = at.clamp(max=self._longest - 1)
            if isinstance(rotary, LongAngles):
                self._pieces.append(self._stacked(rotary.short(self._like, at, **self._arguments), at[0]))
                self._long_pieces.append(self._stacked(rotary.long(self._like, at, **self._arguments), at[0]))
                self._long_table = torch.cat(self._long_pieces, dim=1)
            else:
                self._pieces.append(self._stacked(rotary(self._like, at, **self._arguments), at[0]))
        self._table = torch.cat(self._pieces, dim=1)

    def _stacked(self, angles: Angles, at: torch.Tensor) -> torch.Tensor:
        """Cosines and sines [2, T, R] of what a rotary module gives for positions [T]."""
        cos, sin = cos_and_sin(angles)
        return torch.stack(self._rotation.arranged(cos[0], sin[0], at))

    def _find_axes(self) -> torch.Tensor:
        """Find out which angles change with which of a position's three numbers."""
        at = torch.zeros(3, 1, 3, dtype=torch.int64, device=self._like.device)
        at[range(3), 0, range(3)] = 1
        given = self._rotary(self._like, at, **self._arguments)
        sin = whole_angles(cos_and_sin(given)[1][0], self._rotation.layout)
        # The sine of an angle is 0 in the rows whose position is 0 in the dimension that it follows.
        axes: torch.Tensor = (sin != 0).to(torch.int64).argmax(dim=0)
        return axes


class AngleTables:
    """The angles of all kinds, side by side."""

    def __init__(self, kinds: Sequence[AngleKind], like: torch.Tensor, longest: int) -> None:
        """`longest`: the most tokens of a sequence."""
        self._tables = [RotaryTable(kind, like, longest) for kind in kinds]
        self._none = like.new_empty(0, 0)
        ends = accumulate((table.width for table in self._tables), initial=0)
        self.columns = [range(first, end) for first, end in pairwise(ends)]
        """Where the angles of each kind are."""

    @property
    def width(self) -> int:
        """The number of angles for a position."""
        return self.columns[-1].stop if self.columns else 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `rows`, which may be wider than that of the model's."""
        return self.rows(np.zeros(1, dtype=np.int64))[0].dtype

    def rows(self, positions: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, width] of positions [T], or of positions in three dimensions [3, T] (M-RoPE)."""
        if len(self._tables) == 1:
            return self._tables[0].rows(positions)
        if not self._tables:
            nothing = self._none.new_empty(positions.shape[-1], 0)
            return nothing, nothing
        cos, sin = zip(*(table.rows(positions) for table in self._tables), strict=True)
        return torch.cat(cos, dim=1), torch.cat(sin, dim=1)

    def split(self, cos: torch.Tensor, sin: torch.Tensor) -> dict[int | None, tuple[torch.Tensor, torch.Tensor]]:
        """The cosines and sines of each kind, from those of all; by None none, [T, 0]."""
        kinds: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {None: (cos[:, :0], sin[:, :0])}
        if len(self.columns) == 1:
            return kinds | {0: (cos, sin)}
        for kind, part in enumerate(self.columns):
            at = slice(part.start, part.stop)
            kinds[kind] = cos[:, at].contiguous(), sin[:, at].contiguous()
        return kinds

    def split_recorded(self, cos: Rows, sin: Rows) -> dict[int | None, tuple[Rows, Rows]]:
        """The same for a program."""
        kinds: dict[int | None, tuple[Rows, Rows]] = {None: (cos.columns(0, 0), sin.columns(0, 0))}
        for kind, part in enumerate(self.columns):
            kinds[kind] = cos.columns(part.start, part.stop), sin.columns(part.start, part.stop)
        return kinds

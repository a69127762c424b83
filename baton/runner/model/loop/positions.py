"""Rows that a model has for each position, and adds to those of its embedding."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class PositionRows:
    """A part of a model that gives a row for each position."""

    part: nn.Module
    arguments: Mapping[str, Any]
    """What it was given, by name."""
    name: str
    """Which of the arguments are the positions."""

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """The rows [T, N] of positions, int64 [T]."""
        rows: torch.Tensor = self.part(**{**self.arguments, self.name: positions[None]})[0]
        return rows


def positions_of(part: nn.Module, args: Any, kwargs: Any, out: Any) -> PositionRows | None:
    """The part that was called with these arguments and gave `out`, if its rows follow from positions alone."""
    told = dict(inspect.signature(type(part).forward).bind(part, *args, **kwargs).arguments)
    told.pop("self", None)
    for name, at in told.items():
        if not isinstance(at, torch.Tensor) or at.dtype != torch.int64 or at.ndim != 2 or at.shape[0] != 1:
            continue
        # The call that is watched has the first positions; those behind the longest sequence are the last one.
        if not torch.equal(at[0], torch.arange(at.shape[1], device=at.device).clamp(max=at.max())):
            continue
        found = PositionRows(part, told, name)
        if isinstance(out, torch.Tensor) and torch.equal(found.rows(at[0].flip(0)).flip(0), out[0]):
            return found
    return None

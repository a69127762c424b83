"""What a call is seen to take and give: tensors among its arguments, rows, angles, and whether their bits are equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from baton.runner.model.fused.streams import side_by_side
from baton.runner.model.mixtures.router import FusedRouter


class Choice(NamedTuple):
    """What a call of a router gave."""

    router: FusedRouter
    source: int
    """The number of the rows that it took."""
    given: tuple[torch.Tensor | None, ...]


def takes_choice(given: Sequence[torch.Tensor], choice: Choice) -> bool:
    """Whether experts are given rows, and exactly which experts a router has chosen and their weights."""
    _, *others = given
    return len(others) == 2 and all(any(value is own for own in choice.given) for value in others)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors are equal, where NaN equals NaN."""
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def rows_of(out: Any) -> torch.Tensor | None:
    rows = out[0] if isinstance(out, tuple) and out else out
    return rows if isinstance(rows, torch.Tensor) else None


def are_angles(value: object) -> bool:
    return (isinstance(value, tuple) and len(value) == 2) or (isinstance(value, torch.Tensor) and value.is_complex())


def are_same(given: Any, told: Any) -> bool:
    """Whether angles are those that a rotary module has given."""
    return given is told if isinstance(told, torch.Tensor) else given[0] is told[0]


def flat(rows: torch.Tensor) -> torch.Tensor:
    """Rows [.., N] as [T, N]; of several streams [S, 1, T, N] as [T, S * N]."""
    if rows.ndim == 4 and rows.shape[1] == 1:
        return side_by_side(rows)[0]
    return rows.reshape(-1, rows.shape[-1])


def equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and ours.dtype == theirs.dtype and same_bits(ours, theirs)

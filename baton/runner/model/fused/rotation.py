"""What attention does with queries, keys and values by their positions, and the angles that it takes for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

AngleLayout = Literal["halves", "half", "pairs"]
"""How a model's cosines and sines are laid out: both halves are equal, only one half is there, or each two neighbours
are equal."""
Angles = tuple[torch.Tensor, torch.Tensor] | torch.Tensor
"""What a rotary module gives: cosines and sines, or complex numbers that have both."""


@dataclass(frozen=True, slots=True)
class QueryScale:
    """What queries are multiplied with at each position: 1 + beta * ln(1 + floor((position + first) / length))."""

    beta: float
    length: float
    first: int = 0
    """What the model counts the first position as."""

    def times(self, angles: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Cosines or sines [T, R] of positions, int64 [T], which rotate queries and multiply them with that."""
        # torch's logarithm rounds differently in the tail of a tensor, which float64 hides from narrower angles.
        at = positions.to(angles.device, torch.float64)
        factors = 1 + self.beta * torch.log1p(torch.floor((at + self.first) / self.length))
        return (angles * factors[:, None].float()).to(angles.dtype)


@dataclass(frozen=True, slots=True)
class Rotation:
    """What an attention layer does with queries, keys and values between their product and the attention."""

    kind: Literal["halves", "pairs", "none"]
    """Which columns of a head belong together: those of one half and the other, or each two neighbours."""
    layout: AngleLayout
    """How the angles that the layer is given are laid out."""
    norms_last: bool = False
    """Whether queries and keys are rotated before their norms."""
    query_factor: float = 1.0
    """What the model multiplies queries with before attention; here it is part of attention's scale."""
    bound: float | None = None
    """What queries, keys and values are before anything else if they exceed it, in either direction; None: they may."""
    query_scale: QueryScale | None = None
    """How queries are multiplied by position, if all columns of heads are rotated, or none; None: they are not."""
    is_backwards: bool = False
    """Whether columns are rotated by the opposite of the angles that the layer is given."""
    value_factor: float = 1.0
    """What values are multiplied with."""
    key_factor: float = 1.0
    """What the model multiplies keys with, which the cache has without it: it is part of attention's scale, too."""

    def arranged(
        self, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, R] with two equal halves, as the operations take them, from those of the model.

        With a scale of queries, which needs `positions`, int64 [T], theirs follow those of keys: [T, 2 R].
        """
        if self.is_scale_alone:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        cos, sin = (whole_angles(angles, self.layout, self.query_scale, positions) for angles in (cos, sin))
        return cos, -sin if self.is_backwards else sin

    @property
    def is_scale_alone(self) -> bool:
        """Whether queries are multiplied by position, and nothing is rotated: all angles are zero then."""
        return self.kind == "none" and self.query_scale is not None

    @property
    def takes_angles(self) -> bool:
        """Whether queries and keys are multiplied with cosines and sines."""
        return self.kind != "none" or self.query_scale is not None

    @property
    def of_angles(self) -> Rotation:
        """A rotation with what decides about the angles alone."""
        kind: Literal["halves", "none"] = "none" if self.is_scale_alone else "halves"
        return Rotation(kind, self.layout, query_scale=self.query_scale, is_backwards=self.is_backwards)


def cos_and_sin(angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and sines of what a rotary module gives."""
    return (angles.real, angles.imag) if isinstance(angles, torch.Tensor) else angles


def whole_angles(
    angles: torch.Tensor, layout: AngleLayout, scale: QueryScale | None = None, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Cosines or sines [T, R] with two equal halves, from angles [T, R] or, where they are of one half, [T, R / 2].

    With a scale those of queries at these positions follow: [T, 2 R].
    """
    if layout == "halves":
        whole = angles.contiguous()
    else:
        half = angles if layout == "half" else angles[:, ::2]
        whole = torch.cat((half, half), dim=-1)
    if scale is None or positions is None:
        return whole
    return torch.cat((whole, scale.times(whole, positions)), dim=-1)

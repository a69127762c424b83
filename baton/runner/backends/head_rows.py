"""The queries, keys and values of a step between their product and attention, for operations that prepare all at once.

Only what is common has this form: keys and queries are each normed by heads, or not at all, and then rotated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class HeadNorm(NamedTuple):
    """A root mean square norm of each head, as of `Operations.rms_norm`."""

    weight: torch.Tensor
    eps: float
    plus_one: bool


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Queries, keys and values of one layer, whose heads are dense. Queries are changed in place."""

    queries_and_keys: torch.Tensor
    """[T, H + KH, D], queries first."""
    value: torch.Tensor
    """[T, KH, VD]"""
    num_queries: int
    """H"""
    norms: tuple[HeadNorm, HeadNorm] | None
    """The norms of queries and of keys, with the same `plus_one`; None: there are none."""
    in_pairs: bool
    """As of `Operations.rotate`."""

    def of(self, queries_and_keys: torch.Tensor, value: torch.Tensor) -> HeadRows:
        """The same of other rows."""
        return replace(self, queries_and_keys=queries_and_keys, value=value)

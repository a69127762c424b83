"""Where weights are placed in packed memory: stacked over their outputs, or as gate and up (csrc/kernels.h)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

_PANEL = 16
"""Columns of a panel."""


class _Matrix(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


W_contra = TypeVar("W_contra", bound=_Matrix, contravariant=True)
W = TypeVar("W", bound=_Matrix)


class Place(Protocol[W_contra]):
    """Writes the rows of a weight to packed columns.

    They begin at column `first`, and each 16 rows go `spread` panels behind the 16 before them.
    """

    def __call__(self, weight: W_contra, first: int, spread: int) -> None: ...


def place_stacked(weights: Iterable[W], place: Place[W]) -> None:
    """Place weights [n_i, k] one behind the other."""
    first = 0
    for weight in weights:
        place(weight, first, 1)
        first += weight.shape[0]


def gated_columns(n: int) -> int:
    """The number of packed columns of a gate and an up with n outputs each."""
    return -(-n // _PANEL) * 2 * _PANEL


def place_gated(gate: W, up: W, place: Place[W]) -> None:
    """Place two weights [n, k] so that their panels take turns."""
    place(gate, 0, 2)
    place(up, _PANEL, 2)

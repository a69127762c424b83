"""Which tiles a GPU computes a product in; they decide how fast it is, and no bit of it (triton_product.py)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple


class Tile(NamedTuple):
    """How a product is divided: a program computes `rows` of x times `columns` of weights, `step` of k at a time."""

    rows: int
    columns: int
    """Rows of weights; a gated product has half as many of gate and of up each."""
    step: int
    warps: int = 4
    stages: int = 4
    """How many steps are loaded ahead, which is what shared memory is needed for."""


TILES = (
    Tile(16, 16, 256),
    Tile(16, 32, 256),
    Tile(16, 64, 128),
    Tile(64, 16, 128),
    Tile(64, 32, 128),
    Tile(64, 64, 128, stages=3),
    Tile(64, 128, 64),
    Tile(128, 128, 64, warps=8),
    Tile(128, 256, 64, warps=8, stages=3),
)
"""The tiles of rows in 16 bits. Tiles of 16 rows are multiplied by mma.sync, the others on Hopper by wgmma. The longer
the step, the more of a weight is on its way at the same time, which is what few rows wait for."""
WIDE_TILES = (Tile(16, 32, 32, stages=2), Tile(64, 64, 32, stages=2))
"""The tiles of rows in float32, which no tensor core multiplies without rounding them."""
AMPERE, HOPPER = 80, 90
"""Compute capabilities: of an A100 and of an H100."""
_FEWEST_GATED_COLUMNS = 32
"""A dot has at least 16 columns."""
_LARGEST_GATED_ON_AMPERE = 128 * 128
"""Larger tiles of gate and up need more registers than mma.sync leaves."""
_LARGEST_OF_EXPERTS = 64 * 128
MULTIPROCESSORS = 132
"""An H100 and an H200 have so many. On other GPUs the choice is merely slower than it could be."""
_PRODUCTS_PER_CYCLE = 2048
"""What a multiprocessor of an H100 multiplies and adds in 16 bits."""
_NUMBERS_PER_CYCLE = 20
"""How many numbers of 16 bits a multiprocessor loads, from memory and the second cache together."""


def tiles_of(*, wide: bool, gated: bool, capability: int = HOPPER) -> Sequence[Tile]:
    """The tiles in which a product may be computed; `wide`: of float32 rows. `capability`: of the GPU; 9.0 is 90."""
    tiles = WIDE_TILES if wide else TILES
    if not gated:
        return tiles
    largest = _LARGEST_GATED_ON_AMPERE if capability < HOPPER else sys.maxsize
    return [tile for tile in tiles if tile.columns >= _FEWEST_GATED_COLUMNS and tile.rows * tile.columns <= largest]


def of_experts(tiles: Sequence[Tile]) -> Sequence[Tile]:
    """The tiles that fit beside the places of rows that were chosen, which take registers, too."""
    return [tile for tile in tiles if tile.rows * tile.columns <= _LARGEST_OF_EXPERTS]


def fastest_tile(tiles: Sequence[Tile], rows: int, columns: int) -> Tile:
    """The tile that takes the least time by arithmetic for x [rows, K] and weights [columns, K], gate and up counted.

    Programs run in waves of one a multiprocessor, each as long as its loads or its multiplications take (Williams et
    al., "Roofline", doi:10.1145/1498765.1498785).
    """

    def cycles(tile: Tile) -> float:
        programs = -(-rows // tile.rows) * -(-columns // tile.columns)
        loads = (tile.rows + tile.columns) / _NUMBERS_PER_CYCLE
        products = tile.rows * tile.columns / _PRODUCTS_PER_CYCLE
        return -(-programs // MULTIPROCESSORS) * max(loads, products)

    return min(tiles, key=cycles)

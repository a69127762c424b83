"""A probe of the planned products: x wᵀ, one float32 sum over k in ascending order whatever the tiles are.

On Hopper the instructions for few rows (mma.sync) and for many (wgmma) are thought to add 16 products at a time in the
same way. If so, the shape of a tile, the number of rows, and which columns of w a rank has change no bit of a result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """How the product is cut: `rows` of x times `columns` of the result a program, `step` of k at a time."""

    rows: int
    columns: int
    step: int
    swapped: bool = False
    """The columns are the rows of the instruction, which has 64 of them: for few rows of x."""
    warps: int = 4
    stages: int = 3


TILES = (
    Tile(16, 32, 128),
    Tile(16, 64, 128, swapped=True),
    Tile(64, 64, 64, swapped=True),
    Tile(128, 128, 64, warps=8),
    Tile(128, 256, 64, warps=8),
)
"""The first is computed with mma.sync, the others with wgmma."""
SMALL_TILES = (Tile(16, 16, 16), Tile(16, 32, 32, swapped=True), Tile(32, 16, 32))
"""For Triton's interpreter."""


def product(x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The float32 product [M, N] of x [M, K] and a weight [N, K], both bfloat16. K is a multiple of the tile's step."""
    (rows, width), columns = x.shape, weight.shape[0]
    out = x.new_full((rows, columns), float("nan"), dtype=torch.float32)
    grid = (triton.cdiv(columns, tile.columns), triton.cdiv(rows, tile.rows))
    _product[grid](
        x,
        weight,
        out,
        rows,
        columns,
        width,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STEP=tile.step,
        SWAPPED=tile.swapped,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def _product(
    x,
    weight,
    out,
    num_rows,
    num_columns,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """Programs: tiles of columns x tiles of rows. Rows and columns past the end are those from the start again."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    places = tl.arange(0, STEP)
    from_x = x + (rows % num_rows).to(tl.int64)[:, None] * width + places[None, :]
    from_weight = weight + (columns % num_columns).to(tl.int64)[:, None] * width + places[None, :]
    total = tl.zeros([COLUMNS if SWAPPED else ROWS, ROWS if SWAPPED else COLUMNS], tl.float32)
    for _ in range(0, width, STEP):
        if SWAPPED:
            total = tl.dot(tl.load(from_weight), tl.load(from_x).T, total)
        else:
            total = tl.dot(tl.load(from_x), tl.load(from_weight).T, total)
        from_x += STEP
        from_weight += STEP
    if SWAPPED:
        total = total.T
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * num_columns + columns[None, :], total, mask=inside)

"""Products as Triton kernels: a result's bits depend on its row and its weights alone, in every shape of tiles.

Each sum over k is one chain in ascending order with one float32 accumulator: it is never split, and nothing is added by
atomic operations. Tensor cores add 16 products at a time to the accumulator, in the same way in all their instructions
(mma.sync and wgmma of Hopper, by the descriptions of https://github.com/microsoft/MMA-Sim). So the number of rows, the
shape of tiles, and which columns of a weight a rank has change no bit. The check at start (products.py) tries it on the
GPU. Products of float32 rows are chains of fused multiplications and additions.

What follows the sum is computed in float32 and rounded once: the bias, or activation(gate) * up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cuda.product_tiles import Tile

_GATE_COLUMNS = 1024
_GROUP = 8
"""Tiles of rows whose programs run side by side, so that they find a weight's columns in the second cache."""


def triton_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """The product of x [M, K] and a weight [N, K] transposed, plus bias [N]: [M, N] in `out_dtype`, or x's.

    With an activation the weight is gate and up [2 N, K], and the result activation(x gateᵀ) * (x upᵀ); without a bias.
    Rows of x and of the weight are dense, with gaps between them or none: otherwise ValueError is raised. All are on
    one device.
    """
    if x.stride(-1) != 1 or weight.stride(-1) != 1:
        raise ValueError("rows of x and of the weight must be dense")
    rows, width = x.shape
    gated = activation is not None
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty((rows, columns), dtype=out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    tile_columns = tile.columns // 2 if gated else tile.columns
    programs = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile_columns)
    _product[(programs,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        columns,
        width,
        x.stride(0),
        weight.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile_columns,
        STEP=tile.step,
        GROUP=_GROUP,
        IS_EVEN=width % tile.step == 0,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation or "",
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )
    return out


def triton_gate(sums: torch.Tensor, activation: Activation, out_dtype: torch.dtype) -> torch.Tensor:
    """activation(gate) * up of dense float32 sums [M, 2 N], gate first: [M, N], with the bits of `triton_product`."""
    rows, columns = sums.shape[0], sums.shape[1] // 2
    out = sums.new_empty((rows, columns), dtype=out_dtype)
    if out.numel():
        blocks = triton.cdiv(columns, _GATE_COLUMNS)
        _gate[(rows, blocks)](sums, out, columns, COLUMNS=_GATE_COLUMNS, ACTIVATION=activation, enable_fp_fusion=False)
    return out


@triton.jit(do_not_specialize=["num_columns"])
def _gate(sums, out, num_columns, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    gate = tl.load(sums + 2 * row * num_columns + columns, mask=inside, other=0.0)
    up = tl.load(sums + (2 * row + 1) * num_columns + columns, mask=inside, other=0.0)
    result = activated(gate, ACTIVATION) * up
    tl.store(out + row * num_columns + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def _product(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_columns,
    width,
    x_stride,
    weight_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """One tile. In place of rows and columns past the end the last ones are loaded, and not stored."""
    row_tile, column_tile = _tile_of(num_rows, num_columns, ROWS, COLUMNS, GROUP)
    first_row, first_column = row_tile.to(tl.int64) * ROWS, column_tile.to(tl.int64) * COLUMNS
    last_row, last_column = num_rows - 1 - row_tile * ROWS, num_columns - 1 - column_tile * COLUMNS
    rows, columns, places = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    # Places within a tile take 32 bits: with 64 the largest tiles would need more registers than there are.
    from_x = x + first_row * x_stride + (tl.minimum(rows, last_row)[:, None] * x_stride + places[None, :])
    own_columns = tl.minimum(columns, last_column)
    from_weight = weight + first_column * weight_stride + (own_columns[:, None] * weight_stride + places[None, :])
    to_up = num_columns.to(tl.int64) * weight_stride
    total, up = sums_of(from_x, from_weight, to_up, width, ROWS, COLUMNS, STEP, IS_EVEN, ACTIVATION != "")
    if ACTIVATION != "":
        total = activated(total, ACTIVATION) * up
    if HAS_BIAS:
        total += tl.load(bias + first_column + own_columns).to(tl.float32)[None, :]
    inside = (rows <= last_row)[:, None] & (columns <= last_column)[None, :]
    places_out = out + first_row * num_columns + first_column + (rows[:, None] * num_columns + columns[None, :])
    tl.store(places_out, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sums_of(
    from_x,
    from_weight,
    to_up,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """The sums of a tile, and those of up, which is `to_up` behind the weight: the chains over k of all products.

    `from_x`, `from_weight`: where the first STEP numbers of each row and of each column are.
    """
    places = tl.arange(0, STEP)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = total
    for start in range(0, width, STEP):
        if IS_EVEN:
            own = tl.load(from_x)
            other = tl.load(from_weight)
        else:
            inside_k = (start + places < width)[None, :]
            own = tl.load(from_x, mask=inside_k, other=0.0)
            other = tl.load(from_weight, mask=inside_k, other=0.0)
        total = tl.dot(own, other.T, total, input_precision="ieee")
        if IS_GATED:
            of_up = from_weight + to_up
            other = tl.load(of_up) if IS_EVEN else tl.load(of_up, mask=inside_k, other=0.0)
            up = tl.dot(own, other.T, up, input_precision="ieee")
        from_x += STEP
        from_weight += STEP
    return total, up


@triton.jit
def _tile_of(num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The tile of rows and of columns of this program: those of GROUP tiles of rows are side by side."""
    place = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, ROWS)
    in_group = GROUP * tl.cdiv(num_columns, COLUMNS)
    first = place // in_group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    return first + place % in_group % height, place % in_group // height


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """activation(x) in float32."""
    result = x
    if ACTIVATION == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # tanh(u) = 1 - 2 / (1 + e^2u), of u = (x + 0.044715 x^3) * (2 / pi)^0.5.
        double = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        result = 0.5 * x * (2.0 - 2.0 / (1.0 + tl.exp(double)))
    else:
        result = tl.where(x < 0.0, 0.0, x)
        if ACTIVATION == "relu_squared":
            result = result * x
    return result

"""Mixtures of experts as Triton kernels: rows sorted by expert, products of all experts at once, and their sums.

Nothing is read from the device: grids are as large as any choice of experts needs, and programs without rows end at
once. So CUDA graphs can record a mixture. The sums over k are those of all products (triton_product.py), so that the
bits are those of each expert's products alone, and the sum of a row's experts is that of `Operations.sum_experts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cuda.product_tiles import Tile
from baton.runner.backends.cuda.triton_product import activated, sums_of
from baton.runner.backends.routing import SharedRows

_PAIRS = 64
"""How many pairs of a row and an expert a program sorts."""
_COLUMNS = 1024


def triton_mixture(
    x: torch.Tensor,
    chosen: torch.Tensor,
    ups: torch.Tensor,
    downs: torch.Tensor,
    activation: Activation,
    tile: Tile,
) -> torch.Tensor:
    """What each row's experts give, not yet summed: [T * most, K], of x [T, K] and chosen int32 [T, most].

    `ups`: gates and ups [E, 2 N, K], `downs`: [E, K, N]. What belongs to experts beyond E is undefined. A row has no
    expert twice.
    """
    (count, most), num_experts = chosen.shape, ups.shape[0]
    outs = x.new_empty((count * most, downs.shape[1]))
    if count:
        order, starts = _sorted_by_expert(chosen, num_experts)
        inner = x.new_empty((count * most, downs.shape[2]))
        _multiply(x, ups, order, starts, inner, count, tile, most, activation)
        _multiply(inner, downs, order, starts, outs, count, tile, most, None)
    return outs


def triton_sum(
    outs: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    factor: float,
    shared: SharedRows | None,
    num_experts: int | None = None,
) -> torch.Tensor:
    """Compute `Operations.sum_experts` of outs [P, K]; places int32 [T, most], weights float32 [T, most].

    With `num_experts` the places are experts, and outs [T * most, K] what they gave: those beyond give nothing.
    """
    (count, most), width = places.shape, outs.shape[1]
    out = outs.new_empty((count, width))
    if not out.numel():
        return out
    gate = None if shared is None else shared.gate
    rows = outs if shared is None else shared.rows
    _sum_pairs[(count, triton.cdiv(width, _COLUMNS))](
        outs,
        places,
        weights,
        rows,
        outs if gate is None else gate,
        out,
        width,
        0 if rows.shape[0] == 1 else rows.stride(0),
        0 if gate is None else gate.stride(0),
        factor,
        num_experts or 0,
        MOST=most,
        COLUMNS=_COLUMNS,
        ARE_EXPERTS=num_experts is not None,
        HAS_FACTOR=factor != 1.0,
        HAS_SHARED=shared is not None,
        HAS_GATE=gate is not None,
        enable_fp_fusion=False,
    )
    return out


def _sorted_by_expert(chosen: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of rows and experts in the order of experts, int32 [T * most], and where each expert begins, [E + 1]."""
    pairs = chosen.numel()
    order, starts = chosen.new_empty(pairs), chosen.new_empty(num_experts + 1)
    of_pairs = triton.cdiv(pairs, _PAIRS)
    _sort[(of_pairs + triton.cdiv(num_experts + 1, _PAIRS),)](
        chosen, order, starts, pairs, num_experts, of_pairs, PAIRS=_PAIRS
    )
    return order, starts


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    most_rows: int,
    tile: Tile,
    most: int,
    activation: Activation | None,
) -> None:
    """The products of all experts: gated ones of rows of x by their pairs, or others of rows in the order of experts,
    whose results go to their pairs."""
    num_experts, num_columns, width = weight.shape
    gated = activation is not None
    columns = num_columns // 2 if gated else num_columns
    tile_columns = tile.columns // 2 if gated else tile.columns
    row_tiles, column_tiles = triton.cdiv(most_rows, tile.rows), triton.cdiv(columns, tile_columns)
    _grouped_product[(num_experts * row_tiles * column_tiles,)](
        x,
        weight,
        order,
        starts,
        out,
        columns,
        width,
        row_tiles,
        column_tiles,
        x.stride(0),
        weight.stride(1),
        weight.stride(0),
        MOST=most,
        ROWS=tile.rows,
        COLUMNS=tile_columns,
        STEP=tile.step,
        IS_EVEN=width % tile.step == 0,
        ACTIVATION=activation or "",
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "of_pairs"])
def _sort(chosen, order, starts, num_pairs, num_experts, of_pairs, PAIRS: tl.constexpr):
    """Count, for a few pairs or experts, the pairs that come before: those of lesser experts, and equal ones before."""
    program = tl.program_id(0)
    if program < of_pairs:
        own = program * PAIRS + tl.arange(0, PAIRS)
        expert = tl.load(chosen + own, mask=own < num_pairs, other=0)
        before = _pairs_before(chosen, expert, own, num_pairs, PAIRS)
        tl.store(order + before, own, mask=own < num_pairs)
    else:
        wanted = (program - of_pairs) * PAIRS + tl.arange(0, PAIRS)
        first = _pairs_before(chosen, wanted, tl.zeros([PAIRS], tl.int32), num_pairs, PAIRS)
        tl.store(starts + wanted, first, mask=wanted <= num_experts)


@triton.jit
def _pairs_before(chosen, expert, place, num_pairs, PAIRS: tl.constexpr):
    """How many pairs are of a lesser expert than each of these, or of the same and at a lesser place."""
    count = tl.zeros([PAIRS], tl.int32)
    for start in range(0, num_pairs, PAIRS):
        others = start + tl.arange(0, PAIRS)
        of_others = tl.load(chosen + others, mask=others < num_pairs, other=0x7FFFFFFF)
        lesser = of_others[None, :] < expert[:, None]
        equal = (of_others[None, :] == expert[:, None]) & (others[None, :] < place[:, None])
        count += tl.sum((lesser | equal).to(tl.int32), axis=1)
    return count


@triton.jit(do_not_specialize=["num_columns", "row_tiles", "column_tiles"])
def _grouped_product(
    x,
    weight,
    order,
    starts,
    out,
    num_columns,
    width,
    row_tiles,
    column_tiles,
    x_stride,
    weight_stride,
    expert_stride,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """A tile of one expert. Those of its rows that share columns are side by side."""
    program = tl.program_id(0)
    row_tile = program % row_tiles
    column_tile = program // row_tiles % column_tiles
    expert = program // row_tiles // column_tiles
    first_row = tl.load(starts + expert) + row_tile * ROWS
    last_row = tl.load(starts + expert + 1) - 1 - first_row
    if last_row < 0:
        return
    rows, columns, places = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    own_rows = first_row + tl.minimum(rows, last_row)
    pairs = tl.load(order + own_rows).to(tl.int64)
    given = pairs // MOST if ACTIVATION != "" else own_rows.to(tl.int64)
    from_x = x + given[:, None] * x_stride + places[None, :]
    last_column = num_columns - 1 - column_tile * COLUMNS
    first_column = column_tile.to(tl.int64) * COLUMNS
    own_weight = weight + expert.to(tl.int64) * expert_stride + first_column * weight_stride
    from_weight = own_weight + (tl.minimum(columns, last_column)[:, None] * weight_stride + places[None, :])
    to_up = num_columns.to(tl.int64) * weight_stride
    total, up = sums_of(from_x, from_weight, to_up, width, ROWS, COLUMNS, STEP, IS_EVEN, ACTIVATION != "")
    taken = pairs
    if ACTIVATION != "":
        total = activated(total, ACTIVATION) * up
        taken = own_rows.to(tl.int64)
    inside = (rows <= last_row)[:, None] & (columns <= last_column)[None, :]
    to_out = out + taken[:, None] * num_columns + (first_column + columns)[None, :]
    tl.store(to_out, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["factor", "num_experts"])
def _sum_pairs(
    outs,
    places,
    weights,
    shared,
    gate,
    out,
    width,
    shared_stride,
    gate_stride,
    factor,
    num_experts,
    MOST: tl.constexpr,
    COLUMNS: tl.constexpr,
    ARE_EXPERTS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """Some columns of one row, with a rounding wherever `Operations.sum_experts` has one."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros([COLUMNS], tl.float32)
    for number in range(MOST):
        place = tl.load(places + row * MOST + number).to(tl.int64)
        if ARE_EXPERTS:
            place = tl.where(place < num_experts, row * MOST + number, -1)
        weight = tl.load(weights + row * MOST + number)
        given = tl.load(outs + place * width + columns, mask=inside & (place >= 0), other=0.0).to(tl.float32)
        total += given * weight
    result = total.to(out.dtype.element_ty)
    if HAS_FACTOR:
        result = (result.to(tl.float32) * factor).to(out.dtype.element_ty)
    if HAS_SHARED:
        added = tl.load(shared + row * shared_stride + columns, mask=inside, other=0.0)
        if HAS_GATE:
            own = tl.load(gate + row * gate_stride).to(tl.float32)
            share = (1.0 / (1.0 + tl.exp(-own))).to(out.dtype.element_ty).to(tl.float32)
            added = (added.to(tl.float32) * share).to(out.dtype.element_ty)
        result = (result.to(tl.float32) + added.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, result, mask=inside)

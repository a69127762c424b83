"""Root mean square norms as a Triton kernel: a row's bits depend on the row alone.

torch's mean over the last dimension spreads a row over more threads the fewer rows there are, and so adds its squares
in another order. Here one program computes one row, in one order for each width: what Triton would derive from the
alignment of an address or a stride, which differ from row to row, is left out (do_not_specialize), and a product and a
sum are never contracted into one rounding.

Nothing is read from the device to start the kernel, so that CUDA graphs can record it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WARPS = 4


def triton_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, plus_one: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum x + residual in their dtype, or x without a residual; and the `Operations.rms_norm` of it, [..., N].

    There may be gaps between the rows of an x [T, H, N].
    """
    width = x.shape[-1]
    if x.dim() != 3 or x.stride(-1) != 1 or residual is not None:
        x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(x)
    if not x.numel():
        return total, out
    rows = x if x.dim() == 3 else x.view(-1, 1, width)
    given = x if residual is None else residual.contiguous()
    _norm_row[(rows.shape[0] * rows.shape[1],)](
        rows,
        given,
        total,
        weight.contiguous(),
        out,
        rows.shape[1],
        *rows.stride()[:2],
        width,
        eps,
        WIDTH=triton.next_power_of_2(width),
        ADDS=residual is not None,
        PLUS_ONE=plus_one,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    return total, out


@triton.jit(
    do_not_specialize=["x", "residual", "total", "weight", "out", "heads", "row_stride", "head_stride", "width", "eps"]
)
def _norm_row(
    x,
    residual,
    total,
    weight,
    out,
    heads,
    row_stride,
    head_stride,
    width,
    eps,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """One row; only x may have gaps between its rows."""
    place = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    first = place // heads * row_stride + place % heads * head_stride
    row = tl.load(x + first + columns, mask=inside, other=0.0)
    if ADDS:
        other = tl.load(residual + place * width + columns, mask=inside, other=0.0)
        row = (row.to(tl.float32) + other.to(tl.float32)).to(row.dtype)
        tl.store(total + place * width + columns, row, mask=inside)
    wide = row.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / width
    normal = wide * tl.rsqrt(mean + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = normal * (1.0 + factor) if PLUS_ONE else normal.to(row.dtype).to(tl.float32) * factor
    tl.store(out + place * width + columns, result.to(row.dtype), mask=inside)

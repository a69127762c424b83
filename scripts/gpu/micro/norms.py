"""A norm with the addition before it, by Baton's kernel and by torch."""

from __future__ import annotations

import torch

from baton.runner.backends.torch_operations import rms_norm
from gpu.made_model import DTYPES
from gpu.room import device_of, has_room
from gpu.shapes import fill_by_counter
from gpu.stage import StageContext

_EPS = 1e-5


def measure(context: StageContext) -> None:
    """Report norms of the widths of the shapes, for decode steps and prompts."""
    for width in (64,) if context.tiny else (2048, 4096, 8192):
        for rows in (3,) if context.tiny else (1, 16, 128, 2048, 8192):
            _norm(context, rows, width)


def _norm(context: StageContext, rows: int, width: int) -> None:
    from baton.runner.backends.cuda.triton_norm import triton_norm

    device = device_of(context)
    dtype = DTYPES[device.type]
    if not has_room(context, f"norm {rows} x {width}", num_bytes=8 * 4 * rows * width, seconds=0.5):
        return
    x, residual = (torch.empty(rows, width, dtype=dtype, device=device) for _ in range(2))
    for name, tensor in (("x", x), ("residual", residual)):
        fill_by_counter(tensor, name, deviation=1.0)
    weight = torch.ones(width, dtype=dtype, device=device)
    own = context.time(lambda: triton_norm(x, residual, weight, _EPS, False), repeats=9, graph=True, cold=True)
    torchs = context.time(lambda: rms_norm(x + residual, weight, _EPS, False), repeats=9, graph=True, cold=True)
    gigabytes = 4e-9 * rows * width * dtype.itemsize
    context.report(
        "norm",
        rows=rows,
        width=width,
        us=own.ms * 1e3,
        torch_us=torchs.ms * 1e3,
        gb_per_s=gigabytes / own.ms * 1e3,
    )

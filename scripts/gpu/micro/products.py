"""Products as a runner calls them today, beside one call of torch's `linear`."""

from __future__ import annotations

import torch
from torch.nn import functional

from gpu.made_model import DTYPES, made_operations
from gpu.room import device_of, has_room
from gpu.shapes import LLAMA_1B, LLAMA_8B, LLAMA_70B, TINY, Matrix, fill_by_counter
from gpu.stage import StageContext

_FULL = ((LLAMA_1B, 1), (LLAMA_8B, 1), (LLAMA_70B, 4))
"""Shapes, and in how many parts their columns are divided."""
_ROWS = (1, 16, 64, 256, 2048, 8192)
_MOST_LOGITS = 256
"""A head computes only rows that sample."""
_SECONDS = 1.0
"""More than any one size takes, its weight included."""


def measure(context: StageContext) -> None:
    """Report every weight of the shapes with every number of rows, small numbers of rows first."""
    for rows in (1, 5) if context.tiny else _ROWS:
        for shape, parts in ((TINY, 1),) if context.tiny else _FULL:
            for matrix in shape.matrices(parts):
                if matrix.kind == "float32" and rows > _MOST_LOGITS:
                    continue
                _product(context, f"{shape.name}/{parts}" if parts > 1 else shape.name, matrix, rows)


def _product(context: StageContext, shape: str, matrix: Matrix, rows: int) -> None:
    device = device_of(context)
    dtype = DTYPES[device.type]
    outputs, inputs = matrix.outputs, matrix.inputs
    # A packed weight is a copy, and a product in several calls has its result twice, in float32 while it is gated.
    num_bytes = dtype.itemsize * (2 * outputs * inputs + rows * inputs * 2) + 12 * rows * outputs
    if not has_room(context, f"product {shape} {matrix.name} {rows}", num_bytes=num_bytes, seconds=_SECONDS):
        return
    operations = made_operations(device)
    weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
    x = torch.empty(rows, inputs, dtype=dtype, device=device)
    fill_by_counter(weight, "weight")
    fill_by_counter(x, "rows", deviation=1.0)
    packed = operations.pack(weight)

    def ours() -> torch.Tensor:
        if matrix.kind == "gated":
            return operations.gated_linear(x, packed, activation="silu")
        return operations.linear(x, packed, out_dtype=torch.float32 if matrix.kind == "float32" else None)

    with torch.inference_mode():
        own = context.time(ours, repeats=9, graph=True, cold=True)
        ceiling = context.time(lambda: functional.linear(x, weight), repeats=9, graph=True, cold=True)
    teraflop = 2e-12 * rows * outputs * inputs
    gigabytes = 1e-9 * dtype.itemsize * (outputs * inputs + rows * (inputs + outputs))
    context.report(
        "product",
        shape=shape,
        matrix=matrix.name,
        rows=rows,
        outputs=outputs,
        inputs=inputs,
        us=own.ms * 1e3,
        linear_us=ceiling.ms * 1e3,
        ratio=own.ms / ceiling.ms,
        tflops=teraflop / own.ms * 1e3,
        linear_tflops=teraflop / ceiling.ms * 1e3,
        gb_per_s=gigabytes / own.ms * 1e3,
        linear_gb_per_s=gigabytes / ceiling.ms * 1e3,
    )

"""Rows of tensors as the bytes of frames."""

from __future__ import annotations

import torch


def bytes_of(rows: torch.Tensor) -> memoryview:
    """A copy of the rows' bytes, in the host's memory."""
    if rows.device.type == "cpu":
        rows = rows.clone(memory_format=torch.contiguous_format)
    return memoryview(rows.cpu().contiguous().view(torch.uint8).numpy().reshape(-1))


def tensor_of(data: bytearray | memoryview, dtype: torch.dtype, num_rows: int) -> torch.Tensor:
    """Rows [num_rows, width] in these bytes, which they share. Raises ValueError for a number of bytes that does not
    divide into so many rows."""
    if not num_rows or not data:
        return torch.empty(num_rows, 0, dtype=dtype)
    if len(data) % (num_rows * dtype.itemsize):
        raise ValueError(f"{len(data)} bytes are no {num_rows} rows of {dtype}")
    return torch.frombuffer(data, dtype=dtype).view(num_rows, -1)

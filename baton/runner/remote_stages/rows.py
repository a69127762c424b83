"""Rows of tensors as the bytes of frames."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def bytes_of(rows: torch.Tensor) -> memoryview:
    """A copy of the rows' bytes, in the host's memory.

    On return a GPU has computed all that was started before, also where there are no rows (see `on_host`).
    """
    if rows.device.type == "cpu":
        rows = rows.clone(memory_format=torch.contiguous_format)
    elif rows.numel() == 0:
        torch.cuda.current_stream(rows.device).synchronize()
    data: npt.NDArray[np.uint8] = rows.cpu().contiguous().view(torch.uint8).numpy().reshape(-1)
    return data.data


def tensor_of(data: bytearray | memoryview, dtype: torch.dtype, num_rows: int, width: int) -> torch.Tensor:
    """Rows [num_rows, width] in these bytes, which they share. Raises ValueError for another number of bytes."""
    if len(data) != num_rows * width * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not {num_rows} rows of {width} {dtype}")
    if not data:
        return torch.empty(num_rows, width, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(num_rows, width)

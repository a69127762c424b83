"""A micro-batch, and the bytes in which ranks and stages tell each other its numbers and rows.

A micro-batch is a step, or a part of one, that goes through the stages at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from baton.runner.execution.input_batch import FlatBatch

Array = npt.NDArray[Any]

_WORD = 8
_HEADER_WORDS = 128
_MOST_DIMENSIONS = 3
"""The most dimensions of an array."""
_FIELDS = tuple(field.name for field in fields(FlatBatch))
_OPTIONAL = {place for place, field in enumerate(fields(FlatBatch)) if field.default is None} | {len(_FIELDS)}
"""The places of arrays that may be absent; the last one is `MicroBatch.logits_rows`."""
_DTYPES = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.uint8))
_ABSENT = -1
"""In place of a dtype: there is no such array."""
_ALIGNMENT = 64
_MOST_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What all ranks and stages compute together."""

    batch: FlatBatch
    logits_rows: Array | None
    """The rows that give logits; None: those that sample."""


class ReadNumbers(NamedTuple):
    """A micro-batch that was read, and where its numbers ended."""

    micro: MicroBatch
    end: int


def write_numbers(micro: MicroBatch, memory_of: Callable[[int], npt.NDArray[np.uint8]]) -> int:
    """Write the numbers of a micro-batch; returns where they end.

    `memory_of` is called once with a number of bytes, and returns at least so many.
    """
    arrays: list[Array | None] = [*(getattr(micro.batch, name) for name in _FIELDS), micro.logits_rows]
    header = np.zeros(_HEADER_WORDS, dtype=np.int64)
    header[0] = len(arrays)
    end, word = _HEADER_WORDS * _WORD, 2
    places: list[tuple[int, Array]] = []
    for array in arrays:
        if array is None:
            header[word] = _ABSENT
        else:
            header[word : word + 2] = _DTYPES.index(array.dtype), array.ndim
            header[word + 2 : word + 2 + array.ndim] = array.shape
            places.append((end, array))
            end = aligned_behind(end, array.nbytes)
        word += 2 + _MOST_DIMENSIONS
    header[1] = end
    memory = memory_of(end)
    memory[: header.nbytes] = header.view(np.uint8)
    for place, array in places:
        memory[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return end


def read_numbers(memory_of: Callable[[int], npt.NDArray[np.uint8]]) -> ReadNumbers:
    """Read a micro-batch that `write_numbers` wrote, with copies of its numbers.

    `memory_of` is called with numbers of bytes, and returns at least so many. Raises ValueError for other bytes.
    """
    size = _HEADER_WORDS * _WORD
    header = memory_of(size)[:size].view(np.int64)
    count, end = int(header[0]), int(header[1])
    if count != len(_FIELDS) + 1 or not size <= end <= _MOST_BYTES:
        raise ValueError(f"{count} arrays in {end} bytes are no micro-batch")
    memory = memory_of(end)
    arrays: list[Array | None] = []
    start, word = size, 2
    for _ in range(count):
        dtype, ndim = int(header[word]), int(header[word + 1])
        if dtype == _ABSENT and len(arrays) in _OPTIONAL:
            arrays.append(None)
            word += 2 + _MOST_DIMENSIONS
            continue
        shape = header[word + 2 : word + 2 + min(ndim, _MOST_DIMENSIONS)].tolist()
        if not (0 <= dtype < len(_DTYPES) and 0 <= ndim <= _MOST_DIMENSIONS and all(0 <= n <= end for n in shape)):
            raise ValueError(f"an array of type {dtype} with {ndim} dimensions {shape} is not of a micro-batch")
        num_bytes = math.prod(shape) * _DTYPES[dtype].itemsize
        if start + num_bytes > end:
            raise ValueError(f"an array of {num_bytes} bytes does not lie in the {end} bytes of its micro-batch")
        arrays.append(memory[start : start + num_bytes].view(_DTYPES[dtype]).reshape(shape).copy())
        start = aligned_behind(start, num_bytes)
        word += 2 + _MOST_DIMENSIONS
    *numbers, rows = arrays
    return ReadNumbers(MicroBatch(FlatBatch(*numbers), rows), end)  # type: ignore[arg-type]  # `_OPTIONAL`


def aligned_behind(start: int, num_bytes: int) -> int:
    """The next aligned place behind `num_bytes` bytes from `start` on."""
    return -(-(start + num_bytes) // _ALIGNMENT) * _ALIGNMENT


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

"""Rows for a prompt in the bytes of a safetensors file: one tensor, checked whole before anything of it is used.

Needs numpy alone, and allocates nothing that is as large as the rows.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

import numpy as np

from baton.messages.spans import ROW_DTYPES

MAX_HEADER_BYTES = 4096
"""The longest header: one tensor needs about a hundred bytes."""
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LEAST_REFUSED = {"float32": 0x7F7F8000, "bfloat16": 0x7F80, "float16": 0x7C00}
"""The bits of the least number that is refused: infinity, and in float32 what bfloat16 would round to it."""
_MOST_IN_SHAPE = 1 << 31
_PIECE = 1 << 16


class UnsoundRows(Exception):
    """The bytes are no sound rows; the message says why, without naming what they are."""


class PromptRows(NamedTuple):
    """Rows of a prompt."""

    dtype: str
    """One of ROW_DTYPES."""
    length: int
    width: int
    rows: memoryview
    """The numbers [length, width]."""


def read_rows(data: bytes) -> PromptRows:
    """The one tensor in the bytes of a safetensors file, with finite numbers. Raises UnsoundRows."""
    length = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else 0
    if not 0 < length <= MAX_HEADER_BYTES or 8 + length > len(data):
        raise UnsoundRows(f"is no safetensors file with a header of 1 to {MAX_HEADER_BYTES} bytes")
    entry = _entry(data[8 : 8 + length])
    stored, shape = entry.get("dtype"), entry.get("shape")
    dtype = _DTYPES.get(stored) if isinstance(stored, str) else None
    if dtype is None:
        raise UnsoundRows(f"has a tensor of dtype {stored!r:.20}; {', '.join(_DTYPES)} are taken")
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(_is_size, shape)):
        raise UnsoundRows(f"has a tensor of shape {shape!r:.60}; it must be [rows, numbers in a row]")
    rows = memoryview(data)[8 + length :]
    num_bytes = shape[0] * shape[1] * ROW_DTYPES[dtype]
    if entry.get("data_offsets") != [0, num_bytes] or num_bytes != len(rows):
        raise UnsoundRows(
            f"has a tensor {shape} of {stored}, {num_bytes} bytes, at {entry.get('data_offsets')!r:.60} of {len(rows)} "
            "bytes; it must fill them"
        )
    if not are_finite(dtype, rows):
        raise UnsoundRows("has numbers that are not finite, or too large for bfloat16")
    return PromptRows(dtype, shape[0], shape[1], rows)


def are_finite(dtype: str, rows: bytes | memoryview) -> bool:
    """Whether numbers of this dtype are finite, also once they are rounded to bfloat16."""
    bits = np.frombuffer(rows, "<u4" if dtype == "float32" else "<u2")
    without_sign, refused = (0x7FFFFFFF if dtype == "float32" else 0x7FFF), _LEAST_REFUSED[dtype]
    # In pieces, so that no copy is as large as the rows.
    pieces = (bits[start : start + _PIECE] for start in range(0, bits.size, _PIECE))
    return all(bool(((piece & without_sign) < refused).all()) for piece in pieces)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < _MOST_IN_SHAPE


def _entry(header: bytes) -> dict[str, Any]:
    """The one tensor in a header."""
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError):
        raise UnsoundRows("is no safetensors file: its header is not JSON") from None
    if not isinstance(entries, dict):
        raise UnsoundRows("is no safetensors file: its header is no JSON object")
    tensors = [entry for name, entry in entries.items() if name != "__metadata__"]
    if len(tensors) != 1 or not isinstance(tensors[0], dict):
        raise UnsoundRows(f"has {len(tensors)} tensors; it must have one, with dtype, shape and data_offsets")
    return tensors[0]

"""What spans mean for a step: the rows of those that overlap it, as bytes in the model's dtype, and their positions.

Needs only numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from baton.messages.spans import ROW_DTYPES, Span
from baton.runner.execution.encoded_rows import EncodedRows
from baton.runner.execution.input_batch import FlatBatch, Scheduled

Bytes = npt.NDArray[np.uint8]


def with_given_rows(
    batch: FlatBatch, scheduled: Sequence[Scheduled], dtype: str, width: int, encoded: EncodedRows
) -> FlatBatch:
    """The batch with the rows of spans, if its shares, in the same order, have any at their positions.

    `dtype`: that of the model, float32 or bfloat16. `width`: numbers in a row. `encoded`: the rows of images, those of
    the shares' positions among them.
    """
    places: list[npt.NDArray[np.int64]] = []
    pieces: list[Bytes] = []
    for index, share in enumerate(scheduled):
        spans = share.state.spans
        if not spans or share.start >= spans[-1].stop:
            continue
        for span in spans:
            start, stop = max(span.start, share.start), min(span.stop, share.stop)
            if start < stop:
                first = int(batch.query_start[index]) - share.start
                places.append(np.arange(first + start, first + stop))
                if span.is_encoded:
                    rows = encoded.rows(span, start - span.start, stop - span.start)
                    pieces.append(_in_dtype(rows, dtype).reshape(stop - start, -1))
                else:
                    pieces.append(_converted(span, start - span.start, stop - span.start, dtype, width))
    if not places:
        return batch
    return replace(batch, given_at=np.concatenate(places), given=np.concatenate(pieces))


def with_grid_positions(batch: FlatBatch, scheduled: Sequence[Scheduled]) -> FlatBatch:
    """The batch with rotary positions in three dimensions, if its shares, in the same order, have images in grids."""
    if all(share.state.grid_positions is None for share in scheduled):
        return batch
    in_grids = np.broadcast_to(batch.positions, (3, batch.positions.size)).copy()
    for index, share in enumerate(scheduled):
        if share.state.grid_positions is not None:
            first = int(batch.query_start[index])
            in_grids[:, first : first + share.count] = share.state.grid_positions.rows(share.start, share.stop)
    return replace(batch, in_grids=in_grids)


def with_sources(batch: FlatBatch, scheduled: Sequence[Scheduled]) -> FlatBatch:
    """The batch with the inputs of the shares, in the same order, of a model with an encoder and a decoder."""
    spans = [share.state.spans for share in scheduled]
    sources = [(each[0].length, each[-1].stop) if each else (0, 0) for each in spans]
    return replace(batch, sources=np.array(sources, dtype=np.int32).reshape(-1, 2))


def _converted(span: Span, start: int, stop: int, dtype: str, width: int) -> Bytes:
    """The rows [start, stop) of a span as bytes [rows, width * size of dtype], rounded to the nearest number."""
    row_bytes = width * ROW_DTYPES[span.dtype]
    rows = np.frombuffer(span.rows, np.uint8)[start * row_bytes : stop * row_bytes]
    if span.dtype != dtype:
        rows = _in_dtype(_widened(rows, span.dtype), dtype)
    return rows.reshape(stop - start, -1)


def _in_dtype(rows: npt.NDArray[np.float32], dtype: str) -> Bytes:
    """Numbers as bytes in float32 or bfloat16."""
    flat = np.ascontiguousarray(rows).reshape(-1)
    return (flat if dtype == "float32" else _to_bfloat16(flat)).view(np.uint8)


def _widened(rows: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "float16":
        return rows.view(np.dtype("<f2")).astype(np.float32)
    if dtype == "bfloat16":
        return (rows.view(np.dtype("<u2")).astype(np.uint32) << 16).view(np.float32)
    return rows.view(np.dtype("<f4"))


def _to_bfloat16(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32 numbers, rounded to the nearest, ties to even; none of them is NaN."""
    bits = rows.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

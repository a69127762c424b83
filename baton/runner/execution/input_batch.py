"""How a step's requests become flat rows: their tokens, positions and slots, and the rows that spans give.

Needs only numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.engine.runner import KVLayout
from baton.engine.scheduler_config import LongSequences
from baton.messages.spans import ROW_DTYPES, Span
from baton.runner.execution.encoded_rows import EncodedRows
from baton.runner.execution.request_table import Scheduled

NO_SLOT = -1
"""The slot of a padding row: nothing is stored."""

NO_ADAPTER_SLOT = -1
"""In the place of an adapter's slot: the row has no adapter."""

NEVER_LONG = 2**62
"""A position behind all others: no row has the angles of long sequences."""


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A step's requests as rows, padding at the end; int64 unless said otherwise.

    token_ids and positions [padded], slots [groups, padded], query_start int32 [B + 1], sample_start int32 [B + 1]
    (the same, counting only rows that sample, the last ones of their sequence), seq_lens int32 [B], block_tables int32
    [groups, B, W], logits_rows [rows that sample].

    given_at [G] and given uint8 [G, bytes of a row]: rows in the model's dtype that replace the embedding's output, and
    where; None: there are none. in_grids [3, padded]: rotary positions in three dimensions; None: `positions` are all.
    adapters int32 [padded]: the slot of the adapter of each row, or -1; None: no row has any.
    sources int32 [B, 2], for a model with an encoder and a decoder: the rows of each sequence's input, and the position
    of the decoder's first token.
    is_long uint8 [padded]: 1 for rows with the angles of long sequences; None: no row has them.
    kept_lens int32 [B]: `seq_lens` without drafts, of which no state may be kept; None: no row is a draft.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    sample_start: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    logits_rows: npt.NDArray[np.int64]
    given_at: npt.NDArray[np.int64] | None = None
    given: npt.NDArray[np.uint8] | None = None
    in_grids: npt.NDArray[np.int64] | None = None
    adapters: npt.NDArray[np.int32] | None = None
    sources: npt.NDArray[np.int32] | None = None
    is_long: npt.NDArray[np.uint8] | None = None
    kept_lens: npt.NDArray[np.int32] | None = None

    @property
    def rotary_positions(self) -> npt.NDArray[np.int64]:
        """The positions that decide angles: [padded], or [3, padded]."""
        return self.positions if self.in_grids is None else self.in_grids


class Rows(NamedTuple):
    """Rows of one sequence: its tokens from position `start` on, of which the last `num_sampled` give logits."""

    token_ids: npt.NDArray[np.int64]
    start: int
    num_sampled: int
    block_table: npt.NDArray[np.int32]
    """At least the blocks of all tokens up to the last row; see `RequestState.block_table`."""
    adapter: int = NO_ADAPTER_SLOT
    """The slot of its adapter."""
    long_from: int = NEVER_LONG
    """The first position with the angles of long sequences."""
    num_drafts: int = 0
    """How many of its last tokens are drafts."""


def flatten(
    scheduled: Sequence[Scheduled],
    layout: KVLayout,
    row_quantum: int,
    adapters: Mapping[str, int] | None = None,
    long_sequences: LongSequences | None = None,
) -> FlatBatch:
    """Concatenate the shares of a step and pad to a multiple of `row_quantum` rows. `adapters`: slots by digest."""
    return flatten_rows(
        [
            Rows(
                share.state.rows(share.start, share.stop),
                share.start,
                share.num_sampled_rows,
                share.state.block_table,
                adapters[share.state.adapter] if adapters and share.state.adapter else NO_ADAPTER_SLOT,
                NEVER_LONG
                if long_sequences is None
                else long_sequences.long_from(share.state.num_prompt_tokens, share.state.num_tokens),
                len(share.drafts),
            )
            for share in scheduled
        ],
        layout,
        row_quantum,
    )


def flatten_rows(sequences: Sequence[Rows], layout: KVLayout, row_quantum: int) -> FlatBatch:
    """Concatenate the rows of sequences and pad to a multiple of `row_quantum` rows."""
    size, block_size, groups = len(sequences), layout.block_size, len(layout.groups)
    counts = np.fromiter((rows.token_ids.size for rows in sequences), dtype=np.int64, count=size)
    starts = np.fromiter((rows.start for rows in sequences), dtype=np.int64, count=size)
    sampling = np.fromiter((rows.num_sampled for rows in sequences), dtype=np.int64, count=size)
    query_start, sample_start = np.zeros(size + 1, dtype=np.int32), np.zeros(size + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    np.cumsum(sampling, out=sample_start[1:])
    seq_lens = starts + counts
    widths = (-(-seq_lens // block_size)).tolist()
    block_tables = np.zeros((groups, size, max(widths, default=0)), dtype=np.int32)
    for index, rows in enumerate(sequences):
        width = widths[index]
        block_tables[:, index, :width] = rows.block_table[: width * groups].reshape(width, groups).T

    num_rows = int(query_start[-1])
    padded = -(-num_rows // row_quantum) * row_quantum
    token_ids, positions = np.zeros(padded, dtype=np.int64), np.zeros(padded, dtype=np.int64)
    slots = np.full((groups, padded), NO_SLOT, dtype=np.int64)
    owners = np.repeat(np.arange(size), counts)
    at = np.arange(num_rows) - (query_start[:-1] - starts)[owners]
    positions[:num_rows] = at
    slots[:, :num_rows] = block_tables[:, owners, at // block_size].astype(np.int64) * block_size + at % block_size
    if size:
        np.concatenate([rows.token_ids for rows in sequences], out=token_ids[:num_rows])
    adapters = None
    if any(rows.adapter != NO_ADAPTER_SLOT for rows in sequences):
        adapters = np.full(padded, NO_ADAPTER_SLOT, dtype=np.int32)
        adapters[:num_rows] = np.repeat([rows.adapter for rows in sequences], counts)
    is_long = None
    if any(rows.long_from < end for rows, end in zip(sequences, seq_lens.tolist(), strict=True)):
        is_long = np.zeros(padded, dtype=np.uint8)
        is_long[:num_rows] = at >= np.array([rows.long_from for rows in sequences])[owners]
    kept_lens = None
    if any(rows.num_drafts for rows in sequences):
        kept_lens = (seq_lens - [rows.num_drafts for rows in sequences]).astype(np.int32)
    sample_ends = np.repeat(query_start[1:].astype(np.int64) - sample_start[1:], sampling)
    logits_rows = sample_ends + np.arange(sample_ends.size)
    return FlatBatch(
        token_ids,
        positions,
        slots,
        query_start,
        sample_start,
        seq_lens.astype(np.int32),
        block_tables,
        logits_rows,
        adapters=adapters,
        is_long=is_long,
        kept_lens=kept_lens,
    )


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
    sources = [(of_request[0].length, of_request[-1].stop) if of_request else (0, 0) for of_request in spans]
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

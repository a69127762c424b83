"""Spans of a prompt: positions whose rows are given, instead of looked up in the model's embedding by token ids.

At the positions of a span a prompt has the token id PLACEHOLDER. It stands for no text: penalties, drafts and log-
probabilities leave it out. What a span is made of is its digest, which is part of the keys of blocks (`span_items`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace

from baton.values import value

PLACEHOLDER = 0
"""The token id at the positions of spans."""
ROW_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes of given rows, with the bytes of a number."""


@value(frozen=True, slots=True)
class Span:
    """Consecutive positions of a prompt with rows of their own."""

    start: int
    length: int
    digest: str
    """Names the content: hex SHA-256. Equal digests mean equal rows."""
    dtype: str = ""
    """One of ROW_DTYPES."""
    rows: bytes = b""
    """The numbers [length, width], little-endian, row by row; empty: they are elsewhere."""
    is_encoded: bool = False
    """Whether an encoder makes the rows of a content, which the digest names."""
    first_row: int = 0
    """Which of the content's rows is that of the first position. Spans of one follow each other, from row 0 on."""
    columns: int = 0
    """Positions in a row of the grid in which an image's lie (M-RoPE); 0: they lie one behind the other."""

    @property
    def stop(self) -> int:
        """The position behind the last one."""
        return self.start + self.length

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any of the positions [start, stop) is in the span."""
        return self.start < stop and start < self.stop

    def without_rows(self) -> Span:
        """The same span without its numbers, which its digest still names."""
        return replace(self, dtype="", rows=b"")


def digest_of_rows(dtype: str, length: int, width: int, rows: bytes | memoryview) -> str:
    """The digest of rows [length, width] of this dtype."""
    content = hashlib.sha256(b"rows 1\0" + dtype.encode() + b"\0" + struct.pack("<QQ", length, width))
    content.update(rows)
    return content.hexdigest()


def has_rows(span: Span, width: int) -> bool:
    """Whether a span's rows have the size that its other fields and the model's width say."""
    return span.dtype in ROW_DTYPES and len(span.rows) == span.length * width * ROW_DTYPES[span.dtype]


def span_items(spans: Sequence[Span], start: int, stop: int) -> list[str]:
    """The items of spans in the key of a block with the positions [start, stop): what overlaps it, and from where."""
    return [_item(span) for span in spans if span.overlaps(start, stop)]


def _item(span: Span) -> str:
    row = f"+{span.first_row}" if span.first_row else ""
    return f"{span.digest}{row}@{span.start}"


def text_pieces(spans: Iterable[Span], start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of the positions [start, stop) that are in no span, in order; `spans` are in order."""
    pieces = []
    for span in spans:
        if span.start > start:
            pieces.append((start, min(span.start, stop)))
        start = max(start, span.stop)
        if start >= stop:
            return [piece for piece in pieces if piece[0] < piece[1]]
    return [piece for piece in [*pieces, (start, stop)] if piece[0] < piece[1]]

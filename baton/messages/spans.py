"""Spans of a prompt: positions whose rows are given, instead of looked up in the model's embedding by token ids.

Some are given by the client, others an encoder makes of contents: images, speech, texts.

At the positions of a span a prompt has the token id PLACEHOLDER. It stands for no text: penalties, drafts and log-
probabilities leave it out. What a span is made of is its digest, which is part of the keys of blocks (`span_items`).
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from baton.messages.ids import Peer
from baton.messages.node_model import GENERATES, Capability
from baton.model_formats.encoder_decoders import aligned
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


class ContentKind(enum.StrEnum):
    """The kinds of content."""

    IMAGE = "image"
    """A file as a client sent it: PNG, JPEG, WebP or GIF."""
    SPEECH = "speech"
    """One channel of 16-bit little-endian PCM, 16,000 samples a second."""
    TEXT = "text"
    """Token ids as little-endian 32-bit numbers, for a model with an encoder and a decoder."""

    @property
    def field(self) -> str:
        """The field of a client's request that it comes from."""
        return _FIELDS[self]

    @property
    def needs(self) -> frozenset[Capability]:
        """What a node must be able to do to generate behind such a content."""
        if self is ContentKind.SPEECH:
            return frozenset((Capability.TRANSCRIBE,))
        return GENERATES | {Capability.IMAGE} if self is ContentKind.IMAGE else GENERATES


_FIELDS = {ContentKind.IMAGE: "images", ContentKind.SPEECH: "audio", ContentKind.TEXT: "prompt"}


@value(frozen=True, slots=True)
class EncoderContent:
    """A content, named by its bytes."""

    digest: str
    """Hex SHA-256 of kind and data, under which its rows are kept: equal digests mean equal contents."""
    data: bytes = b""
    """Empty: it is elsewhere."""
    kind: ContentKind = ContentKind.IMAGE
    held_by: Peer | None = None
    """A node that has made rows of it, for one that has none; None: nobody knows of any."""
    encoded_by: Peer | None = None
    """A node with the role encode, which makes rows of it on demand, or has made them; None: there is none."""

    @classmethod
    def of(cls, data: bytes, kind: ContentKind = ContentKind.IMAGE) -> EncoderContent:
        """The content with these bytes."""
        content = hashlib.sha256(f"{kind} 1\0".encode())
        content.update(data)
        return cls(content.hexdigest(), data, kind)

    def without_data(self) -> EncoderContent:
        """The same content without its data, which its digest still names."""
        return EncoderContent(self.digest, kind=self.kind)


def rows_key(digest: str) -> bytes:
    """The key of a content's rows among the keys of what nodes keep. `digest`: the content's."""
    return bytes.fromhex(digest)


@lru_cache(maxsize=1024)
def source_spans(digest: str, num_rows: int) -> tuple[Span, ...]:
    """The spans of a content that the encoder of a model with a decoder makes so many rows of, at a prompt's beginning.

    The second one, up to the decoder's first token, has rows that mean nothing.
    """
    # Kept, since each step compares those of all its requests.
    rows = Span(0, num_rows, digest, is_encoded=True)
    rest = aligned(num_rows) - num_rows
    return (rows, Span(num_rows, rest, digest, is_encoded=True, first_row=num_rows)) if rest else (rows,)


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """The rows that a node asks for, and what must be the same on both nodes (`rows_decided_by`)."""

    incarnation: str
    """The node that is asked."""
    digest: str
    """Names the input, see `EncoderContent.digest`."""
    model_fingerprint: str
    dtype: str
    numerics: str
    content: EncoderContent | None = None
    """The input, for a node with the role encode that has no rows of it; None: the rows are to be there."""
    num_rows: int = 0
    """How many rows are expected of it."""
    tenant: str = ""
    """The tenant whose request needs them; empty: there are no tenants."""

    @property
    def rows_decided_by(self) -> Mapping[str, str]:
        """What decides which numbers an encoder makes of an input, by name; as in NodeDescription."""
        return {"model_fingerprint": self.model_fingerprint, "dtype": self.dtype, "numerics": self.numerics}

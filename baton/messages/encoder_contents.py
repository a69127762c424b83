"""What the encoder of a model makes rows of, as it travels from routers to nodes: images, speech, texts."""

from __future__ import annotations

import enum
import hashlib
from functools import lru_cache

from baton.messages.capabilities import GENERATES, Capability
from baton.messages.peer import Peer
from baton.messages.spans import Span
from baton.model_formats.encoder_decoders import aligned
from baton.values import value


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

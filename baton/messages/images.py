"""Images as clients send them, and as they travel from routers to nodes: encoded (PNG, JPEG, WebP, GIF)."""

from __future__ import annotations

import hashlib

from baton.values import value


@value(frozen=True, slots=True)
class EncodedImage:
    """An encoded image, named by its content."""

    digest: str
    """Hex SHA-256 of the data, under which its rows are kept: equal digests mean equal images."""
    data: bytes = b""
    """The file; empty: it is elsewhere."""

    @classmethod
    def of(cls, data: bytes) -> EncodedImage:
        """The image in a file."""
        content = hashlib.sha256(b"image 1\0")
        content.update(data)
        return cls(content.hexdigest(), data)

    def without_data(self) -> EncodedImage:
        """The same image without its data, which its digest still names."""
        return EncodedImage(self.digest)

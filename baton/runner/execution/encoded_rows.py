"""The rows of images that an encoder made, by the digests of the images. Needs only numpy."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from baton.messages.spans import Span


class EncodedRows:
    """Rows that are kept until they are forgotten. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._rows: dict[str, npt.NDArray[np.float32]] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._rows

    def put(self, digest: str, rows: npt.NDArray[np.float32]) -> None:
        """Keep the rows [rows, width] of an image."""
        self._rows[digest] = rows

    def forget(self, digests: Iterable[str]) -> None:
        """Forget the rows of these images; unknown ones are skipped."""
        for digest in digests:
            self._rows.pop(digest, None)

    def rows_of(self, span: Span) -> npt.NDArray[np.float32] | None:
        """The rows of a span, float32 [length, width]; None if they are not here."""
        rows = self._rows.get(span.digest)
        found = None if rows is None else rows[span.first_row : span.first_row + span.length]
        return found if found is not None and len(found) == span.length else None

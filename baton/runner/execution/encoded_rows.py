"""The rows that an encoder made of inputs (images, speech, texts), by the digests of these. Needs only numpy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.errors import InvalidRequest
from baton.messages.spans import EncoderContent, Span


class EncodedInputs(Protocol):
    """Encodes the inputs of one model. Called from one thread at a time."""

    def rows(self, content: EncoderContent, num_rows: int) -> npt.NDArray[np.float32]:
        """The rows of an input, float32 [num_rows, width]. Raises InvalidRequest for one that can't be used."""
        ...


class EncodedRows:
    """A `RowEncoder`: rows are kept until they are released. Every method may be called from any thread."""

    def __init__(self, inputs: EncodedInputs | None = None, why_no_inputs: str = "there is no encoder") -> None:
        """`inputs`: makes the rows. `why_no_inputs`: what `encode` says without it."""
        self._inputs = inputs
        self._why_no_inputs = why_no_inputs
        self._rows: dict[str, npt.NDArray[np.float32]] = {}
        self._num_resets = 0
        """How often all rows were released."""
        self._making, self._changing = threading.Lock(), threading.Lock()

    def __contains__(self, digest: str) -> bool:
        return digest in self._rows

    def encode(self, content: EncoderContent, num_rows: int) -> None:
        """Make the rows of an input, and keep them for steps. Raises InvalidRequest for one that can't be used."""
        if self._inputs is None:
            raise InvalidRequest(content.kind.field, f"can't be encoded: {self._why_no_inputs}")
        self.make(content.digest, partial(self._inputs.rows, content, num_rows))

    def put(self, digest: str, rows: npt.NDArray[np.float32]) -> None:
        """Keep the rows [rows, width] of an input."""
        self._rows[digest] = rows

    def make(self, digest: str, make: Callable[[], npt.NDArray[np.float32]]) -> None:
        """Keep the rows [rows, width] of an input that `make` returns, unless all were released meanwhile.

        Of several threads that make rows one does at a time.
        """
        num_resets = self._num_resets
        with self._making:
            rows = make()
        with self._changing:
            if self._num_resets == num_resets:
                self._rows[digest] = rows

    def keep(self, digest: str, num_rows: int, rows: bytes) -> None:
        """Keep the rows of an input that came as bytes, see `bytes_of`. Raises ValueError unless they are so many."""
        self._rows[digest] = np.frombuffer(rows, dtype="<f4").reshape(num_rows, -1)

    def bytes_of(self, digest: str) -> memoryview | None:
        """The rows of an input, float32 [rows, width], little-endian; None if they are not here."""
        rows = self._rows.get(digest)
        return None if rows is None else np.ascontiguousarray(rows, dtype="<f4").data.cast("B")

    def release(self, digests: Iterable[str] | None) -> None:
        """Release the rows of these inputs; unknown ones are skipped. None: of all, also those being made."""
        if digests is None:
            with self._changing:
                self._num_resets += 1
                self._rows.clear()
            return
        for digest in digests:
            self._rows.pop(digest, None)

    def has(self, span: Span) -> bool:
        """Whether the rows of a span are here."""
        rows = self._rows.get(span.digest)
        return rows is not None and span.first_row + span.length <= len(rows)

    def rows(self, span: Span, start: int, stop: int) -> npt.NDArray[np.float32]:
        """The rows [start, stop) of a span, float32 [stop - start, width]. Raises KeyError if they are not here."""
        return self._rows[span.digest][span.first_row + start : span.first_row + stop]

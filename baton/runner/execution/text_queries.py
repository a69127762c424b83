"""Collects the queries of a transcript's tokens, step by step as the prompt is computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.messages.pooling import PoolingParams
from baton.runner.execution.pooling import Pooler


class TextQueries(Pooler):
    """The queries of one request for an alignment, of the heads that align.

    Queries are kept, and not scores: of 448 tokens and 8 heads they have 0.9 MB, where the scores have 21 MB.
    """

    __slots__ = ("_pieces", "_stop")

    def __init__(self, params: PoolingParams) -> None:
        super().__init__(params)
        self._pieces: list[npt.NDArray[np.float32]] = []
        self._stop = params.first_row
        """The position behind the last row that was taken."""

    def places(self, start: int, stop: int, num_tokens: int) -> range:
        """Which of the positions [start, stop) are wanted: from the token before the transcript on."""
        return range(max(start, self.params.first_row), stop)

    def take(self, start: int, rows: npt.NDArray[np.float32]) -> None:
        """Take the queries [n, heads, size] at the positions from `start` on.

        A prompt that begins again replaces what was taken before. Raises ArithmeticError if positions before are
        missing.
        """
        if not rows.shape[0]:
            return
        if start == self.params.first_row:
            self._pieces, self._stop = [], start
        if start != self._stop:
            raise ArithmeticError(f"the queries of the positions before {start} are missing")
        self._pieces.append(rows)
        self._stop += rows.shape[0]

    @property
    def queries(self) -> npt.NDArray[np.float32]:
        """All queries [tokens, heads, size] of a prompt that is computed, beginning with the token before the
        transcript."""
        return np.concatenate(self._pieces)

"""How often each token occurs in a request, updated with every sampled token, for the penalties of each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]


class TokenCounts:
    """The distinct tokens of prompt and output, and how often each occurs."""

    def __init__(self, token_ids: Sequence[int] | Ids, num_prompt_tokens: int) -> None:
        tokens = np.asarray(token_ids, dtype=np.int64)
        self._ids, where = np.unique(tokens, return_inverse=True)
        self._places: dict[int, int] = {token_id: row for row, token_id in enumerate(self._ids.tolist())}
        self._total = np.bincount(where, minlength=self._ids.size)
        self._output = np.bincount(where[num_prompt_tokens:], minlength=self._ids.size)

    def add(self, token_id: int) -> None:
        """Count an output token."""
        row = self._places.setdefault(token_id, len(self._places))
        if row == self._ids.size:
            self._ids, self._total, self._output = map(_grown, (self._ids, self._total, self._output))
        self._ids[row] = token_id
        self._total[row] += 1
        self._output[row] += 1

    def take_back(self, token_id: int) -> None:
        """Subtract an output token that was counted before."""
        row = self._places[token_id]
        self._total[row] -= 1
        self._output[row] -= 1

    def seen(self) -> Ids:
        """The distinct tokens of prompt and output."""
        return self._ids[self._total > 0]

    def occurrences(self) -> tuple[Ids, Counts]:
        """The distinct tokens of prompt and output, and how often each occurs in the output."""
        there = self._total > 0
        return self._ids[there], self._output[there]

    def in_output(self) -> tuple[Ids, Counts]:
        """The distinct tokens of the output, and how often each occurs there."""
        there = self._output > 0
        return self._ids[there], self._output[there]


def _grown(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    grown = np.zeros(max(2 * array.size, 8), dtype=np.int64)
    grown[: array.size] = array
    return grown

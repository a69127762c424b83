"""Detects an output that ends with the same pattern of tokens many times in a row.

The result is a function of the output's tokens alone, so every node that computes a request ends it at the same token,
however many tokens an earlier attempt generated and however the tokens are split into steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from baton.messages.sampling import RepetitionDetection


class RepetitionDetector:
    """Follows one output. The cost of a token is its number of occurrences among the last `max_pattern_size` tokens.

    An output ends with a pattern of p tokens that occurs c times in a row if each of its last p * (c - 1) tokens equals
    the token p positions before. So for each p it is enough to count how many of the last tokens do.
    """

    def __init__(self, rule: RepetitionDetection) -> None:
        self._rule = rule
        self._num_processed = 0
        self._positions: dict[int, deque[int]] = {}
        """The positions of each token among the last `max_pattern_size` ones."""
        self._equal_so_far: dict[int, int] = {}
        """For each distance d: how many tokens in a row, up to the last one, equal the token d positions before."""

    def repeated_pattern_size(self, token_ids: Sequence[int]) -> int:
        """Length of the shortest pattern with which the output ends `min_count` times in a row; 0: there is none.

        `token_ids`: the whole output, of which only the tokens that are new since the last call are processed.
        """
        for position in range(self._num_processed, len(token_ids)):
            self._append(token_ids, position)
        self._num_processed = len(token_ids)
        times = self._rule.min_count - 1
        return min((size for size, count in self._equal_so_far.items() if count >= size * times), default=0)

    def _append(self, token_ids: Sequence[int], position: int) -> None:
        rule, before = self._rule, self._equal_so_far
        positions = self._positions.setdefault(token_ids[position], deque())
        distances = [position - earlier for earlier in positions]
        self._equal_so_far = {
            distance: before.get(distance, 0) + 1 for distance in distances if distance >= rule.min_pattern_size
        }
        positions.append(position)
        outside = position - rule.max_pattern_size
        if outside >= 0:
            gone = self._positions[token_ids[outside]]
            gone.popleft()
            if not gone:
                del self._positions[token_ids[outside]]

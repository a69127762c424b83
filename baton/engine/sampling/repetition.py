"""Output that goes on repeating itself: the same pattern of tokens, again and again, up to its end.

A function of the output's tokens alone, so every node that computes a request ends it at the same token, whichever
tokens it was given and however they were cut into steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from baton.messages.sampling import RepetitionDetection


class RepetitionDetector:
    """Follows one output. A token costs as many operations as the last `max_pattern_size` tokens have equal ones.

    An output ends with a pattern of p tokens that comes c times in a row if its last p * (c - 1) tokens are each equal
    to the one p before. For each p it is enough to count how many are, up to now.
    """

    def __init__(self, rule: RepetitionDetection) -> None:
        self._rule = rule
        self._num_taken = 0
        self._places: dict[int, deque[int]] = {}
        """The positions of each token among the last `max_pattern_size` ones."""
        self._equal_so_far: dict[int, int] = {}
        """For each distance: how many tokens up to the last one are equal to the one so far before."""

    def repeated(self, token_ids: Sequence[int]) -> int:
        """Tokens of the shortest pattern that the output ends with `min_count` times; 0: it does not.

        `token_ids`: the whole output; what was not there in the last call is taken in.
        """
        for place in range(self._num_taken, len(token_ids)):
            self._take(token_ids, place)
        self._num_taken = len(token_ids)
        times = self._rule.min_count - 1
        return min((size for size, count in self._equal_so_far.items() if count >= size * times), default=0)

    def _take(self, token_ids: Sequence[int], place: int) -> None:
        rule, before = self._rule, self._equal_so_far
        places = self._places.setdefault(token_ids[place], deque())
        distances = [place - earlier for earlier in places]
        self._equal_so_far = {
            distance: before.get(distance, 0) + 1 for distance in distances if distance >= rule.min_pattern_size
        }
        places.append(place)
        outside = place - rule.max_pattern_size
        if outside >= 0:
            gone = self._places[token_ids[outside]]
            gone.popleft()
            if not gone:
                del self._places[token_ids[outside]]

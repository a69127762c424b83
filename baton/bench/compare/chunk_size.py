"""Chooses the number of tokens of a step at which an arrangement has its highest goodput. Does no I/O.

With small steps prompts take longer, with large ones running streams pause longer. Which is worse depends on the SLO,
so a comparison at one fixed size may favour either arrangement.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST = 64
"""A step must have room for a token of each running request, of which a node has 64 by default."""
LARGEST = 8192


@dataclass(frozen=True, slots=True)
class TriedSize:
    """A size and the goodput that was found with it, in requests per second."""

    max_num_batched_tokens: int
    goodput: float


class ChunkSizeSearch:
    """Tries the first size, then half of it, and goes on in the direction in which the goodput rises."""

    def __init__(self, first: int, max_tries: int) -> None:
        self._max_tries = max_tries
        self._factor = 0.5
        self._next: int | None = first
        self.tried: list[TriedSize] = []

    @property
    def size(self) -> int | None:
        """The next size to measure; None if the search is over."""
        return self._next

    @property
    def best(self) -> TriedSize:
        """The size with the highest goodput; of equal ones the one that was tried first."""
        return max(self.tried, key=lambda each: each.goodput)

    def add_result(self, goodput: float) -> None:
        """Says the goodput at `size`, and chooses the next size."""
        size = self._next
        assert size is not None
        self.tried.append(TriedSize(size, goodput))
        if len(self.tried) == 1:
            self._propose(size)
            return
        if self.best.max_num_batched_tokens == size:
            self._propose(size)
        elif self._factor < 1 and len(self.tried) == 2:
            self._factor = 2.0
            self._propose(self.tried[0].max_num_batched_tokens)
        else:
            self._next = None

    def _propose(self, start: int) -> None:
        size = round(start * self._factor)
        if size < SMALLEST and len(self.tried) == 1:
            self._factor = 2.0
            size = start * 2
        is_possible = SMALLEST <= size <= LARGEST and len(self.tried) < self._max_tries
        self._next = size if is_possible else None

"""The interface of what guesses the tokens that will follow a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Guesses the tokens that follow those of one sequence.

    A guess may be wrong, too short or empty: the runner verifies every token of it. It costs time and never quality.
    """

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append the sequence's next tokens; the first call has its prompt."""
        ...

    def draft(self, most: int) -> Sequence[int]:
        """Guess at most `most` tokens that follow all tokens so far."""
        ...

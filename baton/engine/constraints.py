"""Grammars: the interface of what follows a sequence's tokens and says which tokens may come next.

A request with a JSON schema waits (WAITING_FOR_GRAMMAR) until its node has compiled the schema outside the engine, to
one matcher for each sequence. The runner asks the matcher before it samples, and gives it the sampled token in the next
step. So the scheduler need not know the tokens, and a step can be decided ahead as for any other request. When the
output is complete, the matcher allows only an end-of-sequence token, which ends the request as it ends any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from baton.messages.sampling import RepetitionDetection

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class TokenMatcher(Protocol):
    """Follows the output of one sequence. Its masks are a function of the tokens that it was given."""

    @property
    def num_tokens(self) -> int:
        """How many tokens the matcher was given."""
        ...

    @property
    def mean_seconds(self) -> float:
        """The CPU time of a token in the mean, over all sequences with this grammar, the last tokens before all."""
        ...

    def take_seconds(self) -> float:
        """The CPU time that the matcher has used since the last call."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append the sequence's next tokens; raises EngineFault for a token that the grammar does not allow."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """A guess at the next tokens, from the text with which every output must go on; often empty.

        The model may write the same text with other tokens, which the masks permit, so the caller verifies each of
        them, as any speculated token. The call changes neither the masks nor the token at which a limit is reached.
        """
        ...

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Set bit i % 32 of word i / 32 for each token i that may come next, and clear the others.

        Raises InvalidRequest when the grammar turns out to be too complex.
        """
        ...


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

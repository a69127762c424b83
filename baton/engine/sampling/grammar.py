"""Output that must fit a grammar: what follows a sequence's tokens and says which token may come next.

A request with a JSON schema waits (WAITING_FOR_GRAMMAR) until somebody outside the engine has compiled it: one matcher
for each sequence. The runner asks the matcher before it draws and tells it what was drawn, so the scheduler need not
know the tokens, and a step can be decided ahead as for any other request. When nothing but the end may follow, the
end-of-sequence token is all that a matcher allows, and that token ends the request as it ends any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class TokenMatcher(Protocol):
    """Follows the output of one sequence, and of no other. A function of the tokens that it was given."""

    @property
    def num_tokens(self) -> int:
        """How many tokens it was given."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """These come next; raises EngineFault for one that may not."""
        ...

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Set bit i % 32 of word i / 32 for each token i that may come next, and clear the others.

        Raises InvalidRequest when the grammar turns out to be too complex.
        """
        ...

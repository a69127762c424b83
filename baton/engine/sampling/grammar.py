"""Grammars: the interface of what follows a sequence's tokens and says which tokens may come next.

A request with a JSON schema waits (WAITING_FOR_GRAMMAR) until its node has compiled the schema outside the engine, to
one matcher for each sequence. The runner asks the matcher before it samples, and gives it the sampled token in the next
step. So the scheduler need not know the tokens, and a step can be decided ahead as for any other request. When the
output is complete, the matcher allows only an end-of-sequence token, which ends the request as it ends any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

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

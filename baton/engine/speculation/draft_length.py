"""How many tokens are worth drafting for one sequence, from how often its drafts have been right."""

from __future__ import annotations

import math

_MEMORY = 0.85
"""The weight of earlier drafts against that of one token later."""
_LARGEST_SHARE = 0.99
"""The largest share of right drafts that is counted on, since none is certain."""
_FIRST_TRIED = 2.0
"""The weight of what is assumed of a new sequence, in drafted tokens."""


class DraftLength:
    """Adapts the length of one sequence's drafts.

    With p, the share of drafted tokens that were right, weighted towards the latest, the i-th token of a draft is right
    with p to the power of i. A draft is as long as this is at least the price of computing one token more. Where no
    token is worth its price, drafting pauses, each time for twice as long.
    """

    def __init__(self, most: int, longest_pause: int, assumed_share: float) -> None:
        """At most `most` tokens a draft. After at most `longest_pause` steps without one, a token is drafted again.

        `assumed_share`: the share of drafted tokens that are assumed to be right, until some have been verified.
        """
        self._most = most
        self._longest_pause = longest_pause
        self._right = assumed_share * _FIRST_TRIED
        self._tried = _FIRST_TRIED
        self._pause = 0
        self._num_to_skip = 0

    def next(self, price: float) -> int:
        """The number of tokens to draft now. To be called once for each step of the sequence.

        `price`: what computing one token more costs, as a share of what a sampled token is worth, above 0.
        """
        if price >= 1.0:
            return 0
        if self._num_to_skip:
            self._num_to_skip -= 1
            return 0
        share = min(_LARGEST_SHARE, self._right / self._tried)
        if share < price:
            return 1  # a pause has ended, and one token tells whether drafts are right again
        return min(self._most, max(1, int(math.log(price) / math.log(share))))

    def verified(self, num_drafted: int, num_right: int, price: float) -> None:
        """Note the fate of a draft. Tokens behind the first wrong one tell nothing."""
        for is_right in [True] * num_right + [False] * (num_right < num_drafted):
            self._right = self._right * _MEMORY + is_right
            self._tried = self._tried * _MEMORY + 1
        if num_right == num_drafted or self._right / self._tried >= price:
            self._pause = 0
        else:
            self.missed()

    def missed(self) -> None:
        """Pause, since drafts are not worth their price, or there was nothing to draft."""
        self._pause = min(self._longest_pause, max(1, 2 * self._pause))
        self._num_to_skip = self._pause

"""How much work the tokens of one grammar are: the CPU time of its masks, over all sequences that have it.

llguidance counts its work, and stops at limits. But a mask of 50,000 items takes half a millisecond for an object with
200 optional keys and a second for an ambiguous grammar, so that no count tells them apart.
"""

from __future__ import annotations

import math

_WEIGHT = 1 / 16
"""The weight of a token in the mean: a single mask that takes long, as the first ones may, does not decide."""


class GrammarCost:
    """The cost of one grammar. May be used from several threads: then a token may be missing in the mean."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        """The CPU time of a token, as a fading mean, in seconds."""
        self.is_served = False
        """Whether a trial did not take too long."""
        self.refused_until = -math.inf
        """Until when trials that took too long refuse it, by the clock of who tried."""

    def add(self, seconds: float) -> None:
        """Count a token."""
        self.mean_s += (seconds - self.mean_s) * _WEIGHT

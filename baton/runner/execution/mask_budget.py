"""The time that masks of costly grammars may take of a node's steps, so that no request stops all others.

Masks of ordinary grammars take 0.02 to 0.4 ms of CPU time. A stranger's grammar may take a thousand times as long, also
from some token on only. Then the step of all requests waits for it, n times for n sequences, and for those of as many
requests as the stranger sends. So costly grammars, and they alone, have a budget, all together: once it is used up, a
request with such a grammar ends. A request that is computed alone keeps nobody waiting, except for who comes next: that
one waits for a step, so only a step's masks are bounded then, and the budget is as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable

COSTLY_S = 0.0005
"""A grammar is costly if a token takes more CPU time than this, in the mean."""
SHARE = 0.1
"""The share of the time that masks of costly grammars may take beside other requests."""
BURST_S = 0.1
"""What they may take at once: an ordinary grammar may be costly while its automaton is built."""
ALONE_S = 0.5
"""What they may take in a step that computes one request alone."""


class MaskBudget:
    """The budget of one runner. Belongs to one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left_beside = BURST_S
        self._left_alone = ALONE_S
        self._paid_at = clock()
        self.is_shared = False
        """Whether the step computes several requests."""

    def begin_step(self, is_shared: bool) -> None:
        """Add what the time since the last step earned."""
        now = self._clock()
        self._left_beside = min(BURST_S, self._left_beside + SHARE * (now - self._paid_at))
        self._left_alone = ALONE_S
        self._paid_at = now
        self.is_shared = is_shared

    def permits(self, mean_seconds: float) -> bool:
        """Whether a mask may be filled of a grammar whose tokens take this CPU time in the mean."""
        left = self._left_beside if self.is_shared else self._left_alone
        return left > 0 or mean_seconds <= COSTLY_S

    def spend(self, seconds: float, mean_seconds: float) -> None:
        """Count the CPU time of a mask. Of a single one that takes very long, no more than a burst is held against
        those after it."""
        if mean_seconds <= COSTLY_S:
            return
        if self.is_shared:
            self._left_beside = max(-BURST_S, self._left_beside - seconds)
        else:
            self._left_alone -= seconds

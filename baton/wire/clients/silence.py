"""When a peer that says nothing is asked whether it is there, and when it counts as lost. Pure: time is an argument.

A router that was killed resets its connections; one that was stopped, or whose machine is gone, says nothing. So while
calls are open and none of them brings anything, a client asks its router; no answer means that it is lost, and every
call with it.
"""

from __future__ import annotations

import grpc

PROBE_TIMEOUT_S = 1.5
"""How long the answer may take."""
_NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class Silence:
    """Of one peer, while something is expected of it. Seconds on one clock."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: after so long without a word it is asked."""
        self.patience_s = patience_s
        self._last_word = 0.0

    def heard(self, now: float) -> None:
        """It said something, or there was nothing that it could have said until now."""
        self._last_word = max(self._last_word, now)

    def left_s(self, now: float) -> float:
        """How long it may still say nothing; it is to be asked when that is 0 or below."""
        return self._last_word + self.patience_s - now

    def is_lost(self, now: float) -> bool:
        """After a question without an answer. Else it spoke meanwhile, or could not be reached at all, which the calls
        hear themselves: it is to be asked again after the patience.
        """
        return now >= self._last_word + self.patience_s + PROBE_TIMEOUT_S


def is_answer(code: grpc.StatusCode) -> bool:
    """Whether a question that failed with this was answered by the peer itself."""
    return code not in _NO_ANSWER

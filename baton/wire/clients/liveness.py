"""Detects a peer that hangs without closing its connections. Does no I/O; time is an argument.

A router that is killed resets its connections. A router that is stopped, or whose machine is down, sends nothing at
all. While calls are open and none of them receives anything, a client therefore probes its router with a health check.
If the health check is not answered either, the router counts as lost, and all calls to it are ended.
"""

from __future__ import annotations

import grpc

PROBE_TIMEOUT_S = 1.5
"""Seconds within which a probe must be answered."""
_CODES_WITHOUT_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class LivenessTimer:
    """Tracks for how long a peer that should send messages has sent none. All times are seconds on one clock."""

    def __init__(self, silence_s: float) -> None:
        """`silence_s`: seconds without a message after which the peer is to be probed."""
        self.silence_s = silence_s
        self._last_message_at = 0.0

    def restart(self, now: float) -> None:
        """Note that the peer has sent a message, or that no message was expected until now."""
        self._last_message_at = max(self._last_message_at, now)

    def until_probe_s(self, now: float) -> float:
        """Seconds until the peer is to be probed; 0 or less: it is to be probed now."""
        return self._last_message_at + self.silence_s - now

    def is_lost(self, now: float) -> bool:
        """Whether the peer is lost, after a probe without an answer.

        False if the peer has sent something meanwhile. False also if the probe failed at once because the peer can't be
        reached, since the calls to it fail by themselves then. The peer is then to be probed again after `silence_s`.
        """
        return now >= self._last_message_at + self.silence_s + PROBE_TIMEOUT_S


def is_answer(code: grpc.StatusCode) -> bool:
    """Whether a probe that failed with this code was answered by the peer itself."""
    return code not in _CODES_WITHOUT_ANSWER

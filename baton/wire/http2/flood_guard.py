"""Limits the work that one peer can cause at little cost of its own: a connection that floods us is ended.

Such floods are frames that ask only for an answer or for nothing (PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty or
tiny DATA), calls that are refused, and streams that are opened only to be reset: by the peer (CVE-2023-44487), or by us
because the peer breaks their rules (CVE-2025-8671). Useful frames that we send pay for some of them, and so does time.
"""

from __future__ import annotations

from baton.wire.http2.frames import ENHANCE_YOUR_CALM, ConnectionFault

MAX_USELESS = 1_000
"""Limit of the useless frames that are not made up for by useful ones."""
USELESS_PER_USEFUL = 4
"""Useless frames that are permitted for each piece of an answer that was sent: window updates and pings."""
FREE_RESETS = 2_000
"""Streams that an authenticated peer may reset without any answered stream."""
FREE_RESETS_UNAUTHENTICATED = 200
"""Streams that a peer may reset without any answered stream before it is authenticated."""
RESETS_PER_ANSWER = 4
"""Further streams that may be reset for each answered stream."""


class FloodGuard:
    """Counts the floods of one connection; its `count_` methods raise ConnectionFault when there are too many."""

    __slots__ = ("_num_answers", "_num_resets", "_num_useless", "free_resets")

    def __init__(self) -> None:
        self._num_useless = 0
        self._num_resets = self._num_answers = 0
        self.free_resets = FREE_RESETS
        """Streams that may be reset without any answered stream."""

    def count_useless(self, times: int = 1) -> None:
        """Count frames that cost the peer less than us."""
        self._num_useless += times
        if self._num_useless > MAX_USELESS:
            raise ConnectionFault(
                ENHANCE_YOUR_CALM, "too many frames that ask for nothing, or whose answers are not read"
            )

    def sent(self, num_pieces: int) -> None:
        """Credit useful pieces that were handed to the kernel: frames, or their headers and payloads."""
        if self._num_useless:
            self._num_useless = max(0, self._num_useless - USELESS_PER_USEFUL * num_pieces)

    def forgive(self) -> None:
        """Forget all useless frames, for a peer that sends few of them over days."""
        self._num_useless = 0

    def count_answer(self) -> None:
        """Count a stream that was answered."""
        self._num_answers += 1

    def count_reset(self) -> None:
        """Count a stream that the peer opened, and reset or broke before its answer."""
        self._num_resets += 1
        if self._num_resets > self.free_resets + RESETS_PER_ANSWER * self._num_answers:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too many streams that are opened only to be reset")

"""What one peer makes us do for nothing, counted: it ends a connection that floods us with what costs it little.

Each kind of HTTP/2 flood is one that gives nobody anything: frames that want only an answer, or none (pings, settings,
priorities, window updates, empty or tiny DATA), calls that are refused, streams that are opened only to be reset by
the peer (CVE-2023-44487) or, since it breaks their rules, by us (CVE-2025-8671). What we send that is of use pays for
some of them, as does time.
"""

from __future__ import annotations

from baton.wire.http2.frames import ENHANCE_YOUR_CALM, ConnectionFault

MAX_USELESS = 1_000
"""Frames for nothing that nothing has paid for."""
USELESS_PER_USEFUL = 4
"""So many may come for each piece of an answer: a window update of its stream, one of the connection, a ping."""
FREE_RESETS = 2_000
FREE_RESETS_OF_STRANGERS = 200
RESETS_PER_ANSWER = 4


class FloodGuard:
    """Counts the floods of one connection; its methods raise ConnectionFault when there are too many frames."""

    __slots__ = ("_num_finished", "_num_resets", "_num_useless", "free_resets")

    def __init__(self) -> None:
        self._num_useless = 0
        self._num_resets = self._num_finished = 0
        self.free_resets = FREE_RESETS
        """Streams that may be reset without any that is answered."""

    def useless(self, times: int = 1) -> None:
        """A frame cost the peer less than us."""
        self._num_useless += times
        if self._num_useless > MAX_USELESS:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "it asks for nothing, or does not read the answers")

    def sent(self, num_pieces: int) -> None:
        """So many pieces of use to the peer were taken by the kernel: a frame, or its head and its body."""
        if self._num_useless:
            self._num_useless = max(0, self._num_useless - USELESS_PER_USEFUL * num_pieces)

    def forgive(self) -> None:
        """Some time has passed: for who sends little, and over days."""
        self._num_useless = 0

    def finished(self) -> None:
        """A stream had its answer."""
        self._num_finished += 1

    def was_reset(self) -> None:
        """A stream was opened that the peer's own doing ended before its answer."""
        self._num_resets += 1
        if self._num_resets > self.free_resets + RESETS_PER_ANSWER * self._num_finished:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "streams are opened only to be reset")

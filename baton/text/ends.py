"""Where a text ends: at stop strings, and where it does nothing but repeat itself.

The stop string that is complete first wins; of several that are complete at the same character, the longest. So the
result depends on the text alone, never on how it was split into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Searches one stream for stop strings. Text that may be the beginning of a stop string is held back."""

    __slots__ = ("_held", "_keeps_found", "_stops", "found", "is_off")

    def __init__(self, stops: Sequence[str], *, keeps_found: bool = False) -> None:
        """`keeps_found`: the text ends with the stop string, instead of before it."""
        self._keeps_found = keeps_found
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None
        """The stop string that was found; None if none was."""
        self.is_off = not self._stops
        """Whether there are no stop strings: then all text is returned as it comes."""

    def push(self, text: str) -> str:
        """Take the next piece and return the text that may be sent now; empty once a stop string was found."""
        if self.found is not None:
            return ""
        if self.is_off or not text:
            return text
        window = self._held + text
        hit = self._first_hit(window)
        if hit is not None:
            self.found = hit
            self._held = ""
            return window[: window.index(hit) + (len(hit) if self._keeps_found else 0)]
        keep = self._unsure_length(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def finish(self) -> str:
        """Return the text that was held back, at the end of the stream. Idempotent."""
        rest, self._held = self._held, ""
        return rest

    def _first_hit(self, window: str) -> str | None:
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := window.find(stop)) >= 0]
        return min(hits)[2] if hits else None

    def _unsure_length(self, window: str) -> int:
        """The length of the longest end of the window that is the beginning of a stop string."""
        longest = min(len(window), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            tail = window[len(window) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0


_COPIES = 6
"""Lists, tables and refrains have equal parts, but rarely as many without a difference."""
_CHARS = 512
"""Rulers and rows of zeros are shorter."""
_MAX_UNIT_CHARS = 512
MAX_READ_CHARS = _COPIES * _MAX_UNIT_CHARS
"""No more characters of the end of a text are read."""


def repeated_end(text: str) -> str:
    """The unit that `text` ends with at least 6 copies of, in 512 characters or more; empty if there is none.

    Copies are equal character by character, and the last one may be cut. Of several units it is the shortest.
    """
    for size in range(1, min(_MAX_UNIT_CHARS, len(text) // _COPIES) + 1):
        span = max(_COPIES * size, _CHARS)
        if len(text) >= span and text[-1] == text[-1 - size] and text[-span + size :] == text[-span:-size]:
            return text[-size:]
    return ""

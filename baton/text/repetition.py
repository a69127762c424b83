"""Finds text that does nothing but repeat itself, as small models write at low temperatures."""

from __future__ import annotations

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

"""Suggestions for mistyped names. A module of its own, so that commands that start fast import nothing else with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The text ` (did you mean X?)`, or a list of all known names when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else f" (known: {', '.join(names)})"

"""Shared parts of the lists of requests and of `baton top`."""

from __future__ import annotations

from baton.cli.output import fine_duration

ENDED_STATES = frozenset({"Finished", "Failed", "Cancelled"})


def brief_ms(milliseconds: float) -> str:
    """Milliseconds as short text: `31ms`, `12s`."""
    return f"{milliseconds:.0f}ms" if milliseconds < 9950 else fine_duration(milliseconds / 1e3)

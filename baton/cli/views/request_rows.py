"""What the lists of requests and `baton top` have in common."""

from __future__ import annotations

from baton.cli.output import fine_duration

OVER = frozenset({"Finished", "Failed", "Cancelled"})


def brief_ms(milliseconds: float) -> str:
    """`31ms`, `12s`."""
    return f"{milliseconds:.0f}ms" if milliseconds < 9950 else fine_duration(milliseconds / 1e3)

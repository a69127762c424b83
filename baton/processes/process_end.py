"""Says how a process that computes a part of a model has ended."""

from __future__ import annotations

import signal


def how_it_ended(code: int) -> str:
    """The end of a process in words, from `Popen.returncode`: `was ended by SIGKILL`, `has ended with exit code 1`."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"

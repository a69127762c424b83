"""The second signal forces: whatever hangs then, the process is gone in time."""

from __future__ import annotations

import faulthandler
import os

FORCED_END_S = 1.0


def end_within(seconds: float = FORCED_END_S) -> None:
    """End this process with exit code 1 if it has not ended by then.

    A step that computes, a server that is away, a library that hangs while the interpreter is taken down: nothing holds
    it up, since the watchdog is no thread of Python's.
    """
    # It would also say where every thread is, which nobody asked for.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)

"""Ends the process within a time limit, whatever hangs: for the second signal to stop."""

from __future__ import annotations

import faulthandler
import os

FORCED_END_S = 1.0


def end_within(seconds: float = FORCED_END_S) -> None:
    """End this process with exit code 1 if it has not ended by then.

    Neither a step that computes, nor a server that does not answer, nor a library that hangs in the interpreter's
    shutdown can delay that, since the watchdog is not a Python thread.
    """
    # The watchdog would also print the stack of every thread.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)

"""Ends the process within a time limit, whatever it waits for. Used after a second signal to stop."""

from __future__ import annotations

import faulthandler
import os

FORCED_END_S = 1.0
"""Seconds from the second signal until the process ends in any case."""


def end_within(seconds: float = FORCED_END_S) -> None:
    """End this process with exit code 1 if it has not ended by then.

    Neither a running step, nor a server that does not answer, nor a library that hangs in the interpreter's shutdown
    can delay the end, since the watchdog of `faulthandler` is not a Python thread.
    """
    # The watchdog would also print the stack of every thread.
    devnull = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(seconds, exit=True, file=devnull)

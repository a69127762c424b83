"""How processes end: with their parent, by the kernel, or within a time limit; and how one has ended, in words."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Sequence

from baton.errors import ExitCode

_PR_SET_PDEATHSIG = 1
_BECOME = """
import os, sys
from baton.processes.ends import die_with
die_with(int(sys.argv[1]))
os.execvp(sys.argv[2], sys.argv[2:])
"""
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
FORCED_END_S = 1.0
"""Seconds from the second signal until the process ends in any case."""


def die_with_parent() -> None:
    """On Linux, have the kernel kill this process when its parent ends. May be called between fork and exec."""
    # No lock may be taken there, and little memory allocated.
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with(parent: int) -> None:
    """Do as `die_with_parent`, and end at once if the parent is another one already, because this one has ended."""
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(ExitCode.FAILED)


def ending_with_us(command: Sequence[str]) -> list[str]:
    """The command line for a program that ends when this process does, on Linux also if that is killed.

    The process that starts may have a group of its own, so that Ctrl-C at the terminal is for this process alone. The
    thread that starts it has to live as long as this process.
    """
    return [sys.executable, "-P", "-c", _BECOME, str(os.getpid()), *command]


def how_it_ended(code: int) -> str:
    """The end of a process in words, from `Popen.returncode`: `was ended by SIGKILL`, `has ended with exit code 1`."""
    if code >= 0:
        return f"has ended with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"


def end_within(seconds: float = FORCED_END_S) -> None:
    """End this process with exit code 1 if it has not ended by then.

    Neither a running step, nor a server that does not answer, nor a library that hangs in the interpreter's shutdown
    can delay the end, since the watchdog of `faulthandler` is not a Python thread.
    """
    # The watchdog would also print the stack of every thread.
    devnull = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(seconds, exit=True, file=devnull)

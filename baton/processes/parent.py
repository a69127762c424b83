"""Ends a process with the one that started it, and says how a process has ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from baton.errors import ExitCode

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


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


class DeathPipe:
    """A pipe whose readers see its end when the process that made it has ended."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self._write_end)


def end_with_pipe(descriptor: int) -> None:
    """Watch the read end of a supervisor's pipe in a thread, and end this process at once when the pipe ends."""

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        os._exit(ExitCode.FAILED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def how_it_ended(code: int) -> str:
    """The end of a process in words, from `Popen.returncode`: `was ended by SIGKILL`, `has ended with exit code 1`."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"

"""Ends a process when the one that started it has ended, also where the kernel can't do that: by a pipe."""

from __future__ import annotations

import os
import threading

from baton.errors import ExitCode


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

"""Ends a child process when its supervisor has ended, whatever the reason."""

from __future__ import annotations

import os
import threading

from baton.errors import ExitCode


def end_with_parent(descriptor: int) -> None:
    """Watch the supervisor's pipe in a thread, and end this process at once when the pipe ends."""

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        os._exit(ExitCode.FAILED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()

"""The child's side: end when the supervisor is gone, however it went."""

from __future__ import annotations

import os
import threading

from baton.errors import ExitCode


def end_with_parent(descriptor: int) -> None:
    """Watch the supervisor's pipe in the background; when it ends, so does this process, at once."""

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        os._exit(ExitCode.FAILED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()

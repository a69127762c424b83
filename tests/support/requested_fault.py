"""Requests faults of processes by files (see `baton/failpoints.py`)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from baton.processes.process_stat import process_stat

_BOUND_S = 10.0
_PAUSE_S = 0.01


class RequestedFault:
    """Requests one fault and knows whether it struck. After the `with` block a process that it stopped runs again."""

    def __init__(self, directory: Path, failpoint: str, action: str) -> None:
        self._proof = directory / f"{failpoint}.struck"
        self._request = directory / failpoint
        self._stops = action.startswith("stop")
        self.struck: int | None = None
        """The id of the process that it struck; None: it struck none, or the `with` block is not over."""
        # A process may look at any moment, and must not see an empty file.
        written = directory / f"{failpoint}.wanted"
        written.write_text(action)
        written.rename(self._request)

    def __enter__(self) -> RequestedFault:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._request.unlink()
            return
        except FileNotFoundError:
            # A process took the file: the fault strikes or has struck.
            if not _wait_until(self.has_struck):
                return
        self.struck = self.pid
        if self._stops and _wait_until(lambda: _is_stopped(self.pid)):
            os.kill(self.pid, signal.SIGCONT)
        self._proof.unlink()

    def has_struck(self) -> bool:
        return self._proof.exists()

    @property
    def pid(self) -> int:
        """The id of the process that it struck."""
        return int(self._proof.read_text())


def _is_stopped(pid: int) -> bool:
    try:
        return process_stat(pid).state == "T"
    except FileNotFoundError:
        return False


def _wait_until(condition: Callable[[], bool]) -> bool:
    """Wait until the condition holds and return whether it does. A process that takes the file acts at once."""
    deadline = time.monotonic() + _BOUND_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return condition()

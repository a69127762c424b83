"""Faults that are asked for by files, as `baton/failpoints.py` has it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

_BOUND_S = 10.0
_PAUSE_S = 0.01


class Drill:
    """One fault: asked for, and then proven. Leave the `with` and it is over: what it had stopped runs again."""

    def __init__(self, directory: Path, place: str, words: str) -> None:
        self._proof = directory / f"{place}.struck"
        self._asked = directory / place
        self._stops = words.startswith("stop")
        self.struck: int | None = None
        """Once it is over: the id of the process that it struck, if it struck one."""
        self._asked.write_text(words)

    def __enter__(self) -> Drill:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._asked.unlink()
            return
        except FileNotFoundError:
            # Somebody took it: it strikes, or has struck.
            if not _until(self.has_struck):
                return
        self.struck = self.pid
        if self._stops and _until(lambda: _is_stopped(self.pid)):
            os.kill(self.pid, signal.SIGCONT)
        self._proof.unlink()

    def has_struck(self) -> bool:
        return self._proof.exists()

    @property
    def pid(self) -> int:
        """Of the process that it struck."""
        return int(self._proof.read_text())


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False


def _until(is_so: Callable[[], bool]) -> bool:
    """Whether it came to be so: a process that takes a file acts at once, unless something else ended it."""
    deadline = time.monotonic() + _BOUND_S
    while not is_so() and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return is_so()

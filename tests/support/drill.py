"""Faults that are asked for by files, as `baton/failpoints.py` has it."""

from __future__ import annotations

import os
import signal
from pathlib import Path


class Drill:
    """One fault: asked for, and then proven. Leave the `with` and it is over."""

    def __init__(self, directory: Path, place: str, words: str) -> None:
        self.proof = directory / f"{place}.struck"
        self._asked = directory / place
        self._stops = words.startswith("stop")
        self._asked.write_text(words)

    def __enter__(self) -> Drill:
        return self

    def __exit__(self, *exc: object) -> None:
        self._asked.unlink(missing_ok=True)
        if self.has_struck():
            if self._stops:
                self.go_on()
            self.proof.unlink()

    def has_struck(self) -> bool:
        return self.proof.exists() and bool(self.proof.read_text())

    @property
    def pid(self) -> int:
        """Of the process that it struck."""
        return int(self.proof.read_text())

    def go_on(self) -> None:
        """What was stopped runs again."""
        os.kill(self.pid, signal.SIGCONT)

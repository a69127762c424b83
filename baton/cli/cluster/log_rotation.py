"""Keeps the logs of a run directory bounded: a log that is large enough becomes NAME.log.1, that one NAME.log.2, …

Processes write to their logs themselves, so that a supervisor that is stopped or slow holds up none of them, and none
of them has to know that its log rotates. So a log is copied and then cut to nothing, as by logrotate's `copytruncate`;
what a process writes between the two, which is a matter of microseconds, is lost.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)

MAX_LOG_BYTES = 16 << 20
"""A log of this size rotates."""
NUM_KEPT = 3
"""Older parts of each log."""
LOOK_EVERY_S = 1.0


def older_parts(log: Path) -> Sequence[Path]:
    """The parts that a log has rotated to, the newest first."""
    found: list[Path] = []
    while (part := _part(log, len(found) + 1)).exists():
        found.append(part)
    return found


class LogRotation:
    """Rotates all logs of one directory."""

    def __init__(self, directory: Path, max_bytes: int = MAX_LOG_BYTES, num_kept: int = NUM_KEPT) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._num_kept = num_kept

    def look(self) -> None:
        """Rotate what has become too large. Raises nothing: without rotation a cluster still serves."""
        for log in self._directory.glob("*.log"):
            try:
                if log.stat().st_size > self._max_bytes:
                    self._rotate(log)
            except OSError as error:
                _log.warning("the log %s can't be rotated: %s", log, error.strerror)

    def _rotate(self, log: Path) -> None:
        copy = log.with_name(f"{log.name}.new")
        with log.open("rb") as source:
            try:
                descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(descriptor, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            except OSError as error:
                # A full disk: what would have been kept makes room for what comes.
                with suppress(OSError):
                    copy.unlink()
                _log.warning("the log %s is cut without being kept: %s", log, error.strerror)
            else:
                for number in range(self._num_kept - 1, 0, -1):
                    if (part := _part(log, number)).exists():
                        part.replace(_part(log, number + 1))
                copy.replace(_part(log, 1))
        os.truncate(log, 0)


def _part(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")

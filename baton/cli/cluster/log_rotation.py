"""Rotates the logs of a run directory: a log that is large enough becomes NAME.log.1, that one NAME.log.2, and so on.

Processes write to their logs themselves, so that a supervisor that is stopped or slow delays none of them, and they
need not know that a log rotates. So a log is copied and then truncated, as by `copytruncate` of logrotate. What a
process writes between the two, within microseconds, is lost.
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
"""A log rotates when it is larger than this."""
NUM_KEPT = 3
"""Number of older parts of each log that are kept."""
CHECK_INTERVAL_S = 1.0


def older_parts(log: Path) -> Sequence[Path]:
    """The older parts of a log, the newest first."""
    found: list[Path] = []
    while (part := _part(log, len(found) + 1)).exists():
        found.append(part)
    return found


class LogRotation:
    """Rotates all logs of a directory."""

    def __init__(self, directory: Path, max_bytes: int = MAX_LOG_BYTES, num_kept: int = NUM_KEPT) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._num_kept = num_kept

    def rotate_large_logs(self) -> None:
        """Rotate the logs that are too large. Raises nothing, because a cluster also serves without rotation."""
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
                # The disk is full, so the log is truncated without a copy, to make room for new lines.
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

"""The log files of a run directory: how they rotate, and how they are read as one stream of lines by time."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

_log = logging.getLogger(__name__)

MAX_LOG_BYTES = 16 << 20
"""A log rotates when it is larger than this."""
NUM_KEPT = 3
"""Number of older parts of each log that are kept."""
CHECK_INTERVAL_S = 1.0
_IN_MODIFY = 0x2
_REDIS = re.compile(r"\d+:[A-Z] (\d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2}\.\d{3}) ([.\-*#]) (.*)\Z")
_REDIS_LEVELS = {".": "debug", "-": "info", "*": "info", "#": "warning"}
_COMMON_KEYS = frozenset({"timestamp", "level", "event", "node", "process"})
"""Keys that every line has, or that follow from its file. The others are fields of the line."""
_READ_BYTES = 1 << 20


def older_parts(log: Path) -> Sequence[Path]:
    """The older parts of a log, the newest first."""
    parts: list[Path] = []
    while (part := _part(log, len(parts) + 1)).exists():
        parts.append(part)
    return parts


class LogRotation:
    """Rotates all logs of a directory: NAME.log becomes NAME.log.1, that NAME.log.2, and so on.

    Processes write to their logs themselves, so that a supervisor that is stopped or slow delays none of them, and they
    need not know that a log rotates. So a log is copied and then truncated, as by `copytruncate` of logrotate. What a
    process writes between the two, within microseconds, is lost.
    """

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


class DirectoryWatch:
    """Watches writes to the files of a directory, new files included, with Linux's inotify(7)."""

    def __init__(self, directory: Path) -> None:
        """Start the watch. Raises OSError if the directory can't be watched."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_CLOEXEC)
        watch = libc.inotify_add_watch(self._fd, os.fsencode(directory), _IN_MODIFY)
        if self._fd < 0 or watch < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directory))

    def __enter__(self) -> DirectoryWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)

    def wait(self) -> None:
        """Return as soon as a file was written since the last call or, at first, since the watch began."""
        os.read(self._fd, 1 << 16)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of one process."""

    at: float
    """Seconds since the epoch. A line without a time has that of the line before it."""
    process: str
    level: str
    """Empty if the line has none."""
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The other keys of the line."""

    def to_json(self) -> dict[str, Any]:
        """The line as a JSON object."""
        stamp = datetime.fromtimestamp(self.at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        common = {"timestamp": stamp, "process": self.process, "level": self.level, "event": self.event}
        return {**common, **self.fields}


def parse_line(text: str, process: str, before: float) -> LogLine:
    """Parse a line of a process. `before` is the time of the line before it."""
    if text.startswith("{"):
        try:
            fields = json.loads(text)
            at = datetime.fromisoformat(fields["timestamp"]).timestamp()
            rest = {key: value for key, value in fields.items() if key not in _COMMON_KEYS}
            return LogLine(at, process, str(fields.get("level", "")), str(fields["event"]), rest)
        except (ValueError, KeyError, TypeError):
            # A line that is cut off, or one that another program wrote as JSON.
            return LogLine(before, process, "", text)
    if match := _REDIS.match(text):
        # Redis writes local time.
        at = datetime.strptime(match[1], "%d %b %Y %H:%M:%S.%f").astimezone().timestamp()
        return LogLine(at, process, _REDIS_LEVELS[match[2]], match[3])
    return LogLine(before, process, "", text)


class LogFile:
    """The log of one process, read while it grows and rotates (`LogRotation`)."""

    def __init__(self, path: Path) -> None:
        self.process = path.stem
        self._path = path
        self._offset = 0
        self._rest = b""
        self._at = 0.0
        self._newest_part: int | None = None
        """The inode of the newest part that the log had rotated to by the last call."""

    def read(self) -> Sequence[LogLine]:
        """The complete lines that were written since the last call; none if the file is gone."""
        lines: list[LogLine] = []
        for part in self._new_parts():
            # The oldest new part begins with what was read of the log before it rotated.
            lines += self._read_to_end(part)
            self._offset = 0
        return lines + self._read_to_end(self._path)

    def _new_parts(self) -> Sequence[Path]:
        """The parts to which the log has rotated since the last call, the oldest first."""
        new: list[Path] = []
        inodes: list[int] = []
        for part in older_parts(self._path):
            with suppress(FileNotFoundError):
                inodes.append(part.stat().st_ino)
                if inodes[-1] == self._newest_part:
                    break
                new.append(part)
        self._newest_part = inodes[0] if inodes else None
        return new[::-1]

    def _read_to_end(self, path: Path) -> list[LogLine]:
        lines: list[LogLine] = []
        while piece := self._read_piece(path):
            *whole, self._rest = (self._rest + piece).split(b"\n")
            for text in whole:
                line = parse_line(text.decode(errors="replace"), self.process, self._at)
                self._at = line.at
                lines.append(line)
        return lines

    def _read_piece(self, path: Path) -> bytes:
        try:
            with path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    # The file is shorter than before: another cluster has started a new log.
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                piece = file.read(_READ_BYTES)
        except FileNotFoundError:
            return b""
        self._offset += len(piece)
        return piece


def merged(files: Iterable[LogFile]) -> Sequence[LogLine]:
    """The new lines of all files in the order of time. Lines of one process keep their order."""
    return sorted((line for file in files for line in file.read()), key=lambda line: line.at)

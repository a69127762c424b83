"""Reads the log files of a run directory as one stream of lines in the order of time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton.cli.cluster.log_rotation import older_parts

_REDIS = re.compile(r"\d+:[A-Z] (\d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2}\.\d{3}) ([.\-*#]) (.*)\Z")
_REDIS_LEVELS = {".": "debug", "-": "info", "*": "info", "#": "warning"}
_COMMON_KEYS = frozenset({"timestamp", "level", "event", "node", "process"})
"""Keys that every line has, or that follow from its file. The others are fields of the line."""
_READ_BYTES = 1 << 20


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
            found = json.loads(text)
            at = datetime.fromisoformat(found["timestamp"]).timestamp()
            rest = {key: value for key, value in found.items() if key not in _COMMON_KEYS}
            return LogLine(at, process, str(found.get("level", "")), str(found["event"]), rest)
        except (ValueError, KeyError, TypeError):
            # A line that is cut off, or one that another program wrote as JSON.
            return LogLine(before, process, "", text)
    if match := _REDIS.match(text):
        # Redis writes local time.
        at = datetime.strptime(match[1], "%d %b %Y %H:%M:%S.%f").astimezone().timestamp()
        return LogLine(at, process, _REDIS_LEVELS[match[2]], match[3])
    return LogLine(before, process, "", text)


class LogFile:
    """The log of one process, read while it grows and rotates (`baton.cli.cluster.log_rotation`)."""

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

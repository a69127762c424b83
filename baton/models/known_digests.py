"""Remembers the SHA-256 of files, so that a large file is read once and not at every start.

A digest is valid while the file's device, inode, size and times are the same: whatever writes to a file, or puts
another in its place, changes its ctime. What can't be read or written here costs no more than reading the file again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.models.model_cache import sha256_of
from baton.models.progress import mebibytes, say

_LARGE_BYTES = 512 << 20
"""From this size on, stderr says that the file is being read, which takes a while."""
_SETTLED_NS = 2_000_000_000
"""A file that changed less than this long ago could change again without another ctime, on a coarse clock."""
_MAX_ENTRY_CHARS = 200
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileState:
    """What differs after a file was written to, or replaced by another."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The present state of a file; raises OSError."""
        found = path.stat()
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class KnownDigests:
    """The digests that are remembered in the directory `root`, one entry for each device and inode."""

    def __init__(self, root: Path, now_ns: Callable[[], int], read: Callable[[Path], str] = sha256_of) -> None:
        self._root = root
        self._now_ns = now_ns
        self._read = read

    def sha256_of(self, path: Path, state: FileState) -> str:
        """The SHA-256 of a file that is in this state, remembered or read now.

        Raises ConfigError or OSError if the file can't be read.
        """
        known = self._recall(state)
        if known is not None:
            return known
        if state.size >= _LARGE_BYTES:
            say(f"Reading {path.name} ({mebibytes(state.size)}) to identify it …")
        began_ns = self._now_ns()
        digest = self._read(path)
        if state.ctime_ns < began_ns - _SETTLED_NS and FileState.of(path) == state:
            self._remember(state, digest)
        return digest

    def _recall(self, state: FileState) -> str | None:
        try:
            with self._entry_path(state).open(encoding="ascii") as file:
                text = file.read(_MAX_ENTRY_CHARS)
        except (OSError, ValueError):
            return None
        times, _, digest = text.rpartition(" ")
        return digest if times == _times(state) and _SHA256.fullmatch(digest) else None

    def _remember(self, state: FileState, digest: str) -> None:
        place = self._entry_path(state)
        written = place.with_name(f"{place.name}.{os.getpid()}")
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            written.write_text(f"{_times(state)} {digest}", encoding="ascii")
            written.replace(place)
        except OSError:
            with suppress(OSError):
                written.unlink()

    def _entry_path(self, state: FileState) -> Path:
        return self._root / f"{state.device}-{state.inode}"


def _times(state: FileState) -> str:
    return f"{state.size} {state.mtime_ns} {state.ctime_ns}"

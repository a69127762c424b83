"""Waits until a file of a directory changes, with the kernel's notifications instead of polling."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import TracebackType

_IN_MODIFY = 0x2


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

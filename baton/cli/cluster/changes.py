"""Waits for files of a directory to change, by the kernel's word: nobody has to look again and again."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import TracebackType

_IN_MODIFY = 0x2


class Changes:
    """Writes to files of a directory, new ones too. Linux's inotify, of which Python has no binding."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError for a directory that can't be watched."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_CLOEXEC)
        watch = libc.inotify_add_watch(self._fd, os.fsencode(directory), _IN_MODIFY)
        if self._fd < 0 or watch < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directory))

    def __enter__(self) -> Changes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)

    def wait(self) -> None:
        """Return once something was written since the last call, or since the beginning."""
        os.read(self._fd, 1 << 16)

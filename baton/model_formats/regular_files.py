"""Opens files that others may have put there: never a pipe or a device, which could let a reader wait for ever.

Where others also say which file is read, `only_below` bounds where it may be. What counts is the place of the file that
was opened: a path can lead elsewhere by the time that it is opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

_roots: ContextVar[Sequence[str] | None] = ContextVar("_roots", default=None)


@contextmanager
def only_below(roots: Sequence[str]) -> Iterator[None]:
    """Let this thread open files with `open_regular` in and below these directories only. `roots`: real paths."""
    before = _roots.set(roots)
    try:
        yield
    finally:
        _roots.reset(before)


def is_below(path: str, roots: Sequence[str]) -> bool:
    """Whether a path is one of these directories or below one. All are real paths, without links."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it. Raises OSError for what is no regular file, or is outside of `only_below`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    roots = _roots.get()
    if roots is not None and not is_below(_place_of(descriptor, path), roots):
        os.close(descriptor)
        raise OSError(f"{path} leads out of the directories from which files are read")
    return os.fdopen(descriptor, "rb")


def _place_of(descriptor: int, path: Path) -> str:
    """Where an open file is."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        # There is no /proc here.
        return os.path.realpath(path)

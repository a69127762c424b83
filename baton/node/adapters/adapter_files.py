"""The directories from which a node reads adapters, and the inspection of one there.

A node reads no directory that its operator has not allowed: names of directories come from routers, and a router's
operators may be others than those of the node's host. A link counts as what it leads to.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock

from cachetools import LRUCache

from baton.errors import AdapterRefused
from baton.messages.adapters import is_adapter_directory
from baton.model_formats.adapters import CONFIG_NAME, WEIGHTS_NAME, AdapterInfo
from baton.model_formats.files import is_below, only_below

_MOST_REMEMBERED = 512
_Stamp = tuple[tuple[int, int, int, int], ...]


class AdapterDirectories:
    """Inspects adapters in directories that are allowed. Its methods may be called from any thread."""

    def __init__(self, allowed: Sequence[Path], check: Callable[[Path], AdapterInfo]) -> None:
        """`allowed`: adapters may be in these directories and below. `check` reads the files of an adapter and compares
        them with the model; it raises AdapterRefused.
        """
        self._allowed = allowed
        self._check = check
        self._known: LRUCache[str, tuple[_Stamp, AdapterInfo]] = LRUCache(_MOST_REMEMBERED)
        """What was found in each directory, and the stamps of its files then."""
        self._lock = Lock()

    def inspect(self, directory: str) -> AdapterInfo:
        """Read an adapter's files, unless they are as they were. Raises AdapterRefused."""
        stamp = self.check_place(directory)
        with self._lock:
            known = self._known.get(directory)
        if known is not None and known[0] == stamp:
            return known[1]
        with self.reading():
            info = self._check(Path(directory))
        with self._lock:
            self._known[directory] = stamp, info
        return info

    def check_digest(self, directory: str, digest: str) -> None:
        """Raises AdapterRefused unless the adapter in this directory is sound, fits, and has this digest."""
        found = self.inspect(directory).digest
        if found != digest:
            raise AdapterRefused(
                f"{directory} holds another adapter here: its digest is {found}, and {digest} is wanted; copy the same "
                "files to all nodes"
            )

    def reading(self) -> AbstractContextManager[None]:
        """While this lasts, the thread opens no adapter's file outside of the allowed directories."""
        return only_below(self._roots())

    def _roots(self) -> Sequence[str]:
        return [os.path.realpath(root) for root in self._allowed]

    def check_place(self, directory: str) -> _Stamp:
        """Check where an adapter's files are, and that they are files; returns what changes when they do.

        Raises AdapterRefused. Nothing is read, so that a pipe or a device does no harm.
        """
        if not is_adapter_directory(directory):
            raise AdapterRefused("the directory of an adapter must be an absolute path of at most 1024 bytes")
        roots = self._roots()
        if not _is_below(directory, roots):
            raise AdapterRefused(
                f"{directory} is in no directory from which this node loads adapters; start the node with --lora-dir"
            )
        stamp = []
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            path = os.path.join(directory, name)
            if not _is_below(path, roots):
                raise AdapterRefused(
                    f"{path} leads out of the directories from which this node loads adapters; copy it"
                )
            try:
                found = os.stat(path)
            except (OSError, ValueError):
                raise AdapterRefused(
                    f"{path} is not there; name a directory that PEFT's save_pretrained wrote"
                ) from None
            if not stat.S_ISREG(found.st_mode):
                raise AdapterRefused(f"{path} is not a regular file; copy the adapter's files")
            stamp.append((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))
        return tuple(stamp)


def _is_below(path: str, roots: Sequence[str]) -> bool:
    return is_below(os.path.realpath(path), roots)

"""The cache of model directories that were made of GGUF files, one for each file's content, and the digests of files.

A directory appears whole or not at all: it is written beside its place, flushed, and renamed. A lock lets only one
process make a directory, and others wait for it; the lock ends with its process, so nothing has to be cleaned up.

The SHA-256 of a file is remembered, so that a large file is read once and not at every start. A digest is valid while
the file's device, inode, size and times are the same: whatever writes to a file, or puts another in its place, changes
its ctime. What can't be read or written here costs no more than reading the file again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.models.progress import mebibytes, say

_CONVERTER_VERSION = "5"
"""Part of each directory's name. It is raised when the converter begins to write other files."""

Convert = Callable[[Path, Path], None]
"""Writes the model directory of a GGUF file into an empty directory, and flushes its files."""
FindSource = Callable[[Path], AbstractContextManager[Path]]
"""Gives the GGUF file for the duration of a block. It may use the given empty directory."""
_NO_ROOM = frozenset({errno.EDQUOT, errno.EFBIG, errno.ENOSPC})


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """`baton/models` in XDG_CACHE_HOME, or in `~/.cache`. Raises ConfigError if there is no home directory either."""
    # The XDG specification says that a relative path is to be ignored.
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    try:
        return (named if named.is_absolute() else Path.home() / ".cache") / "baton" / "models"
    except RuntimeError:  # A container may run as a user that its system does not know.
        raise ConfigError("there is no home directory for the cache of models: set XDG_CACHE_HOME") from None


class ModelCache:
    """The model directories below `root`."""

    def __init__(self, root: Path, convert: Convert) -> None:
        self._root = root
        self._convert = convert

    def directory_of(self, sha256: str, find_source: FindSource, num_bytes: int = 0) -> Path:
        """The model directory of the GGUF file with this SHA-256, made now if there is none yet.

        Only then `find_source` is called. Raises ConfigError from it, from the conversion, or if the cache can't be
        written or has no room for `num_bytes`. Both translate their own OSErrors, so that each names what failed.
        """
        directory = self._root / f"{sha256}-{_CONVERTER_VERSION}"
        if directory.is_dir():
            return directory
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked(directory):
                if not directory.is_dir():
                    self._make(directory, find_source, num_bytes)
        except OSError as error:
            path = "" if error.filename is None else f": {error.filename}"
            raise ConfigError(
                f"the cache {self._root} can't be written ({error.strerror or error}{path}): choose a "
                f"{'larger' if error.errno in _NO_ROOM else 'writable'} directory: XDG_CACHE_HOME=DIRECTORY"
            ) from error
        return directory

    def _require_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._root).free
        if free < num_bytes:
            raise ConfigError(
                f"the cache {self._root} has {mebibytes(free)} of room, and the model takes {mebibytes(num_bytes)}: "
                "choose a larger directory: XDG_CACHE_HOME=DIRECTORY"
            )

    def _make(self, directory: Path, find_source: FindSource, num_bytes: int) -> None:
        for left in self._root.glob(f".{directory.name}.*"):
            # A process that was killed left it: whoever makes this directory has the lock.
            shutil.rmtree(left, ignore_errors=True)
        self._require_room(num_bytes)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=self._root) as scratch:
            fetched, made = Path(scratch) / "fetched", Path(scratch) / "made"
            fetched.mkdir()
            made.mkdir()
            with find_source(fetched) as source:
                self._convert(source, made)
            _flush_directory(made)
            made.rename(directory)
            _flush_directory(self._root)

    @contextmanager
    def _locked(self, directory: Path) -> Iterator[None]:
        descriptor = os.open(directory.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("Waiting for another process that makes this model ready …")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal; raises ConfigError if it can't be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        status = path.stat()
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


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
        entry = self._entry_path(state)
        written = entry.with_name(f"{entry.name}.{os.getpid()}")
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            written.write_text(f"{_times(state)} {digest}", encoding="ascii")
            written.replace(entry)
        except OSError:
            with suppress(OSError):
                written.unlink()

    def _entry_path(self, state: FileState) -> Path:
        return self._root / f"{state.device}-{state.inode}"


def _times(state: FileState) -> str:
    return f"{state.size} {state.mtime_ns} {state.ctime_ns}"

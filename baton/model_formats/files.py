"""Reads JSON and the headers of safetensors from files that others may have put there, and writes safetensors.

`open_regular` never opens a pipe or a device, which could let a reader wait for ever. Where others also say which file
is read, `only_below` bounds where it may be. What counts is the place of the file that was opened: a path can lead
elsewhere by the time that it is opened.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from baton.errors import ConfigError

_roots: ContextVar[Sequence[str] | None] = ContextVar("_roots", default=None)


@contextmanager
def only_below(roots: Sequence[str]) -> Iterator[None]:
    """Let this thread open files with `open_regular` in and below these directories only. `roots`: real paths."""
    before = _roots.set(roots)
    try:
        yield
    finally:
        _roots.reset(before)


def allowed_roots() -> Sequence[str] | None:
    """The directories of `only_below` in this thread; None: it may open files anywhere."""
    return _roots.get()


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


_MOST_NESTED = 100
"""How deep the objects of a model's configuration may lie in each other: readers call themselves for each level."""


def read_json(path: Path) -> Any:
    """What a file holds. Raises ConfigError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read as JSON ({error}); copy it again") from error


def read_object(path: Path) -> Mapping[str, Any]:
    """The object that a file holds. Raises ConfigError, also for one that is nested too deep."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object; copy it again")
    if _is_deeper(value, _MOST_NESTED):
        raise ConfigError(f"{path} is nested more than {_MOST_NESTED} deep; copy it again")
    return value


def _is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects lie in each other in more than `most` levels."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


_MOST_HEADER_BYTES = 100_000_000
_MOST_TENSORS = 1_000_000
_LONGEST_NAME = 512


class UnsoundSafetensors(Exception):
    """A file is no sound safetensors file; the message names the file, and says what to do."""


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A header whose tensors fill the rest of the file exactly."""

    content: bytes
    """The JSON text."""
    entries: Mapping[str, Mapping[str, Any]]
    """Each tensor's `data_offsets` (two whole numbers), and its `dtype` and `shape`, which are not checked."""

    @property
    def data_start(self) -> int:
        """Place in the file from which `data_offsets` count."""
        return 8 + len(self.content)


def read_header(
    path: Path, most_bytes: int = _MOST_HEADER_BYTES, most_tensors: int = _MOST_TENSORS
) -> SafetensorsHeader:
    """Read a file's header, of at most `most_bytes` and `most_tensors`. Raises UnsoundSafetensors, and OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        header = file.read(length) if 0 < length <= min(most_bytes, size - 8) else b""
    try:
        entries = json.loads(header)
        tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise UnsoundSafetensors(f"{path} is not a sound safetensors file (bad header); copy it again") from error
    if len(tensors) > most_tensors:
        raise UnsoundSafetensors(f"{path} holds {len(tensors)} tensors; at most {most_tensors} are read")
    for name in tensors:
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise UnsoundSafetensors(f"{path} holds a tensor named {name!r:.80}, which is no name of a weight")
    if 8 + length + end != size:
        raise UnsoundSafetensors(f"{path} is truncated: {size} bytes instead of {8 + length + end}; copy it again")
    return SafetensorsHeader(header, tensors)


class NewTensor(NamedTuple):
    """A tensor of a safetensors file that is to be written."""

    name: str
    dtype: str
    """The dtype has the name that safetensors gives it: F16, U8, …"""
    shape: tuple[int, ...]
    num_bytes: int
    content: Callable[[], bytes | memoryview]
    """Reads its bytes, when it is its turn."""


def write_safetensors(
    path: Path, tensors: Iterable[NewTensor], on_progress: Callable[[int, int], None] = lambda _done, _total: None
) -> None:
    """Write a file tensor by tensor, of which one is in memory at a time, and flush it. Raises OSError.

    Calls `on_progress` with the bytes of tensors that are written, and their total: first with 0.
    """
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    on_progress(0, end)
    with written(path) as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            out.write(tensor.content())
            on_progress(header[tensor.name]["data_offsets"][1], end)


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A new file to write to, which is flushed to the disk behind the block. Raises OSError."""
    with path.open("wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())

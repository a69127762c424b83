"""The header of a safetensors file: the names of its tensors, and where each one lies. Opens no tensor."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.model_formats.regular_files import open_regular

_MOST_BYTES = 100_000_000
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


def read_header(path: Path, most_bytes: int = _MOST_BYTES, most_tensors: int = _MOST_TENSORS) -> SafetensorsHeader:
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

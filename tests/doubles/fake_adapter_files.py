"""An adapter's files on a file system that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from baton.model_formats.adapters import AdapterFiles, read_adapter


@dataclass(frozen=True, slots=True)
class FakeAdapterFiles(AdapterFiles):
    """Files whose weights come only once `answers` is set."""

    is_read: threading.Event = field(default_factory=threading.Event)
    """Set when somebody begins to read the weights."""
    answers: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, directory: Path) -> FakeAdapterFiles:
        """The files in a directory."""
        files = read_adapter(directory)
        return cls(*(getattr(files, one.name) for one in fields(files)))

    def _pieces(self, sizes: Iterable[int]) -> Iterator[bytes]:
        self.is_read.set()
        self.answers.wait()
        return AdapterFiles._pieces(self, sizes)

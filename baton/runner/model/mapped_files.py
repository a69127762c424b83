"""The weight files as they lie mapped in this process: pages that have been copied elsewhere are let go at once.

So that a model is never in memory twice, however its weights must be cast, merged or transposed before they are packed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

_DONT_NEED = 4
_UNREAD_BYTES = 8 << 20
"""So much may be read before what was read earlier is let go."""
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""Read by transformers' loader, which else reads everything ahead: a model whose experts it merges would be in memory
twice."""


class MappedFiles:
    """Where these files are mapped now. A system without /proc has none, and keeps its pages until the end."""

    def __init__(self, paths: Iterable[Path]) -> None:
        names = {str(path.resolve()) for path in paths}
        self._ranges: list[tuple[int, int]] = []
        try:
            lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        except OSError:
            return
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] in names:
                start, _, end = fields[0].partition("-")
                self._ranges.append((int(start, 16), int(end, 16)))

    def release(self, module: nn.Module) -> None:
        """Let go of the pages that hold this module's own parameters and nothing else, and of what others left freed.

        Reading pages maps them again.
        """
        for parameter in module.parameters():
            first = parameter.data_ptr()
            last = first + parameter.numel() * parameter.element_size()
            # Memory that is not a file's must stay: letting go of it would lose what is in it.
            if any(start <= first and last <= end for start, end in self._ranges):
                _let_go(-(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE)
        _trim()

    def release_all(self) -> None:
        """Let go of every page; reading maps them again."""
        for start, end in self._ranges:
            _let_go(start, end)


def _let_go(first: int, last: int) -> None:
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONT_NEED)


def _trim() -> None:
    """Hand what was freed back to the system: the C library keeps it, and little of it fits what comes later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(ctypes.c_size_t(0))


@contextmanager
def tensors_on_file(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """By name, what transformers' loader takes for tensors and reads one after the other, when it comes to each.

    Raises SafetensorError for files that can't be read.
    """
    tensors = _Tensors(paths)
    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    try:
        yield {name: _TensorOnFile(tensors, file, name) for file in tensors.files for name in sorted(file.keys())}
    finally:
        if before is None:
            del os.environ[_ONE_BY_ONE]
        else:
            os.environ[_ONE_BY_ONE] = before
        tensors.mapped().release_all()


class _Tensors:
    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        self._unread = 0

    def mapped(self) -> MappedFiles:
        return MappedFiles(self._paths)

    def read(self, file: Any, name: str) -> Tensor:
        tensor: Tensor = file.get_tensor(name)
        # The loader has cast or merged what it asked for before, or else the pages will be read anew: from the cache.
        self._unread += tensor.nbytes
        if self._unread > _UNREAD_BYTES:
            self._unread = tensor.nbytes
            self.mapped().release_all()
            # What the loader merged has left holes, too: half a mixture's weights by the end.
            _trim()
        return tensor


class _TensorOnFile:
    """Read when it is sliced, as a slice of safetensors is."""

    def __init__(self, tensors: _Tensors, file: Any, name: str) -> None:
        self._tensors = tensors
        self._file = file
        self._name = name

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensors.read(self._file, self._name)[index]

"""The mapped weight files of this process: pages whose content has been copied are dropped from memory at once.

Therefore a model is never in memory twice, even if its weights are cast, merged or transposed before they are packed.
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
"""How many bytes may be read before the pages that were read earlier are dropped."""
_FEW_BYTES = 1 << 20
"""A module whose parameters are smaller keeps their pages: to read where files are mapped takes a millisecond, and a
model has many norms."""
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""An environment variable of transformers' loader, which otherwise reads all tensors ahead: a model whose experts it
merges would be in memory twice."""


class DuplicateTensor(Exception):
    """Two files have a tensor of the same name; the message names all three."""


class MappedFiles:
    """What this process has mapped of some files. On a system without /proc nothing is known, and all pages are kept.

    It is read anew each time, and used for tensors that the caller holds: another thread may unmap its own mapping of
    the same file at any moment, and other memory may get its addresses.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._names = frozenset(str(path.resolve()) for path in paths)

    def release(self, module: nn.Module) -> None:
        """Drop the pages that hold only this module's own parameters, and return freed memory to the system.

        A module of a few bytes keeps its pages. A page that is read later is loaded from the file again.
        """
        parameters = list(module.parameters())
        mapped = self._ranges() if sum(parameter.nbytes for parameter in parameters) > _FEW_BYTES else ()
        for parameter in parameters:
            # Only a file's pages can be loaded again: other memory would lose its content.
            if _around(mapped, parameter) is not None:
                first, last = _addresses(parameter)
                _drop_pages(-(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE)
        _trim()

    def around(self, tensor: Tensor) -> tuple[int, int] | None:
        """The addresses of the whole mapping that holds a tensor; None if its memory is not a file's."""
        return _around(self._ranges(), tensor)

    def _ranges(self) -> list[tuple[int, int]]:
        """Where the files are mapped now."""
        ranges: list[tuple[int, int]] = []
        try:
            lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        except OSError:
            return ranges
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] in self._names:
                start, _, end = fields[0].partition("-")
                ranges.append((int(start, 16), int(end, 16)))
        return ranges


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """The address of a contiguous tensor's first byte, and the one behind its last."""
    first = tensor.data_ptr()
    return first, first + tensor.nbytes


def _around(mapped: Iterable[tuple[int, int]], tensor: Tensor) -> tuple[int, int] | None:
    first, last = _addresses(tensor)
    return next(((start, end) for start, end in mapped if start <= first and last <= end), None)


def _drop_pages(first: int, last: int) -> None:
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONT_NEED)


def _trim() -> None:
    """Return freed memory to the system: the C library would keep it, and little of it fits later allocations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(ctypes.c_size_t(0))


@contextmanager
def tensors_on_file(paths: Sequence[Path]) -> Iterator[dict[str, TensorOnFile]]:
    """The tensors of these files by name, which transformers' loader and layers read one after the other.

    A tensor is read from its file when the loader slices it, and also later, as long as somebody holds it. Raises
    SafetensorError for files that can't be read, and DuplicateTensor if two of them have a tensor of the same name.
    """
    tensors = _Tensors(paths)
    by_name = tensors.by_name()
    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    try:
        yield by_name
    finally:
        if before is None:
            del os.environ[_ONE_BY_ONE]
        else:
            os.environ[_ONE_BY_ONE] = before
        tensors.drop_pages()


class _Tensors:
    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        self._mapped = MappedFiles(paths)
        self._mappings: set[tuple[int, int]] = set()
        """Where the files above are mapped, which last as long as they: of each from the first read on."""
        self._unread = 0

    def by_name(self) -> dict[str, TensorOnFile]:
        tensors: dict[str, TensorOnFile] = {}
        homes: dict[str, Path] = {}
        for path, file in zip(self._paths, self._files, strict=True):
            for name in sorted(file.keys()):
                if name in tensors:
                    raise DuplicateTensor(
                        f"{name} is in {homes[name].name}, and in {path.name}, too; copy all files again"
                    )
                tensors[name], homes[name] = TensorOnFile(self, file, name), path
        return tensors

    def read(self, file: Any, name: str) -> Tensor:
        tensor: Tensor = file.get_tensor(name)
        if _around(self._mappings, tensor) is None and (mapping := self._mapped.around(tensor)) is not None:
            self._mappings.add(mapping)
        # The loader has cast or merged earlier tensors by now; if not, their pages are read again from the page cache.
        self._unread += tensor.nbytes
        if self._unread > _UNREAD_BYTES:
            self._unread = tensor.nbytes
            self.drop_pages()
            # Merging leaves freed holes, too: by the end of a mixture's load, half the size of its weights.
            _trim()
        return tensor

    def drop_pages(self) -> None:
        for first, last in tuple(self._mappings):
            _drop_pages(first, last)


class TensorOnFile:
    """A tensor that is read from its file when it is sliced, as safetensors' own slices are."""

    def __init__(self, tensors: _Tensors, file: Any, name: str) -> None:
        self._tensors = tensors
        self._file = file
        self._name = name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._file.get_slice(self._name).get_shape())

    @property
    def dtype(self) -> str:
        """The dtype has the name that safetensors gives it: F16, I32, F8_E4M3, …"""
        return str(self._file.get_slice(self._name).get_dtype())

    def read(self) -> Tensor:
        """The whole tensor, in the file's mapped memory: copy what must outlive the next reads."""
        return self._tensors.read(self._file, self._name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]

"""The weight files as they lie mapped in this process: pages that have been packed are let go at once."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path

from torch import nn

_DONT_NEED = 4


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
        """Let go of the pages that hold this module's own parameters and nothing else; reading them maps them again."""
        for parameter in module.parameters():
            first = parameter.data_ptr()
            last = first + parameter.numel() * parameter.element_size()
            # Memory that is not a file's must stay: letting go of it would lose what is in it.
            if any(start <= first and last <= end for start, end in self._ranges):
                first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
                if first < last:
                    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONT_NEED)

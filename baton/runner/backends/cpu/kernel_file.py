"""Where the compiled kernels are. No torch here: the digests of a simulated node's blocks come from the same file."""

from __future__ import annotations

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from baton.errors import ConfigError


class KernelsUnavailable(ConfigError):
    """The kernel library is not built, can't be loaded, or lacks the instruction set asked for."""


def open_kernels() -> ctypes.CDLL:
    """Open the library. Raises KernelsUnavailable with the reason and the way out."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).parent / "kernels" / f"_kernels{suffix}"
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                raise KernelsUnavailable(f"the kernel library can't be loaded: {error}") from error
    raise KernelsUnavailable("the kernel library is not built: install a C compiler, then run `pip install -e .` again")

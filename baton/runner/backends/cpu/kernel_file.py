"""Opens the compiled kernel library. Needs no torch: a node with a simulated model uses the library for digests."""

from __future__ import annotations

import ctypes
from pathlib import Path

from baton.errors import ConfigError

LIBRARY = Path(__file__).parent / "kernels" / "libkernels.so"
"""The library, as setup.py builds it. Its name is the same for all versions of Python."""


class KernelsUnavailable(ConfigError):
    """The kernel library is not built, can't be loaded, or lacks the requested instruction set."""


def why_slow() -> str:
    """What to tell, in one line, where a model is computed without the library; empty if it can be opened."""
    try:
        open_kernels()
    except KernelsUnavailable as error:
        return f"{error}. Until then prompts take about twelve times as long (`baton doctor` says more)"
    return ""


def open_kernels() -> ctypes.CDLL:
    """Open the library. Raises KernelsUnavailable, which says why it can't be opened and what to do."""
    if not LIBRARY.exists():
        raise KernelsUnavailable(
            "the kernel library is not built: install a C compiler, then run `pip install -e .` again"
        )
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise KernelsUnavailable(
            f"the kernel library can't be loaded ({error}); run `pip install -e .` again to build it here"
        ) from error

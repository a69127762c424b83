"""Imports transformers without torch's compiler and without what spreads tensors over processes.

When they are imported, transformers' modules mark functions for the compiler, and ask whether tensors may be spread.
torch, too, marks what computes tensors without memory. What answers, `torch._dynamo` and `torch.distributed.tensor`,
takes as long to import as all the rest of transformers, and a good part of a process's memory. Nothing in Baton
compiles a model or spreads a tensor.

Only Baton's own processes import so. `baton.LLM` runs in its user's process, which may do both.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MARKS = ("allow_in_graph", "assume_constant_result", "disable")
"""Decorators of the compiler that say how to compile a function."""


def import_transformers() -> None:
    """Import torch, and what transformers' models need. Without an effect on what is imported already."""
    # torch takes seconds.
    import torch

    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = torch._dynamo = _CompilerOnDemand(Path(torch.__file__).parent)
    is_available, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        with _models_read_once():
            # transformers asks once, and remembers the answer.
            import transformers.modeling_utils  # noqa: F401
    finally:
        torch.distributed.is_available = is_available


_READ_FOLDER = "create_import_structure_from_path"


@contextmanager
def _models_read_once() -> Iterator[None]:
    """Let transformers read the files of its models once, a quarter second of work, to know what they define.

    It does so for `transformers` and again for `transformers.models`, since its cache has room for a quarter of the
    folders.
    """
    with_bounds = functools.lru_cache

    def lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
        if getattr(maxsize, "__name__", "") == _READ_FOLDER:
            return with_bounds(maxsize=None)(maxsize)
        return with_bounds(maxsize, typed)

    functools.lru_cache = lru_cache
    try:
        yield
    finally:
        functools.lru_cache = with_bounds


class _CompilerOnDemand(ModuleType):
    """Stands in the compiler's place until somebody asks it for more than a mark; then it gives way to the compiler."""

    def __init__(self, torch_folder: Path) -> None:
        super().__init__(_COMPILER)
        # One of the compiler's modules is for masks of attention, and needs no compiler.
        self.__path__ = [str(torch_folder / "_dynamo")]
        for name in _MARKS:
            setattr(self, name, _unchanged)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(importlib.import_module(_COMPILER), name)


def _unchanged(function: Callable[..., Any] | None = None, *_args: object, **_options: object) -> Any:
    return function if function is not None else _unchanged

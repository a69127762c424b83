"""Lets a process collect garbage less often while it imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 50_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage only after many new objects (Python's default: 700).

    Imports make objects that stay, those of torch and transformers hundreds of thousands. Looking at them again and
    again takes a tenth of the time of the imports.
    """
    first, *others = gc.get_threshold()
    gc.set_threshold(max(first, _NEW_OBJECTS), *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)

"""Settings of the interpreter: how often it collects garbage while a process imports, how soon threads take turns."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_INTERVAL_S = 0.0005
"""Python's default of 5 ms is as long as a decode step."""
_NEW_OBJECTS = 50_000
"""So many are new before garbage is collected while modules are imported. Python's default is 700."""


def switch_threads_early() -> None:
    """Let no thread keep the interpreter for long from the thread that computes, once that thread is ready to go on.

    Called where a process begins that computes beside an event loop or a mover of blocks: it is for all its threads.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage only after many new objects.

    Imports make objects that stay, those of torch and transformers hundreds of thousands. Looking at them again and
    again takes a tenth of the time of the imports.
    """
    first, *others = gc.get_threshold()
    gc.set_threshold(max(first, _NEW_OBJECTS), *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)

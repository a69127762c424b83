"""Finds objects that only the garbage collector would free, because they are in reference cycles."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collector_off(
    *kinds: type, counts: Callable[[object], bool] = lambda one: True
) -> Iterator[Callable[[], Counter[str]]]:
    """Turn the collector off and yield a function that counts the new objects of exactly these types by name.

    `counts` returns whether an object is to be counted.
    """
    gc.collect()
    gc.disable()
    # Objects that are there now are not looked at again, here or in the next test: there are hundreds of thousands.
    gc.freeze()
    try:
        yield lambda: Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds and counts(one))
    finally:
        gc.enable()

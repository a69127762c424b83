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

    `counts` returns whether an object is to be counted. Objects that existed before are kept alive and not counted.
    """

    def kept() -> list[object]:
        return [one for one in gc.get_objects() if type(one) in kinds and counts(one)]

    gc.collect()
    gc.disable()
    older = kept()
    known = set(map(id, older))
    try:
        yield lambda: Counter(type(one).__name__ for one in kept() if id(one) not in known)
    finally:
        gc.enable()

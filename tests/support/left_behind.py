"""What a test leaves to the garbage collector: objects that are in cycles, found with the collector off."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collector_off(
    *kinds: type, counts: Callable[[object], bool] = lambda one: True
) -> Iterator[Callable[[], Counter[str]]]:
    """Yields a function that counts the objects of exactly these kinds, those aside that were there before.

    `counts` says of an object whether it is one of those meant. Objects of earlier tests are kept meanwhile.
    """

    def kept() -> list[object]:
        return [one for one in gc.get_objects() if type(one) in kinds and counts(one)]

    gc.collect()
    gc.disable()
    of_others = kept()
    known = set(map(id, of_others))
    try:
        yield lambda: Counter(type(one).__name__ for one in kept() if id(one) not in known)
    finally:
        gc.enable()

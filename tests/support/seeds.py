"""The seeds of drawn schedules: how many run, one of them alone, and the seed of one that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_ALONE = "BATON_FAULT_SEED"


def drawn_seeds(count: int) -> range:
    """Return the first `count` seeds, or with `BATON_FAULT_SEED=N` that one alone."""
    alone = os.environ.get(_ALONE)
    return range(count) if alone is None else range(int(alone), int(alone) + 1)


def seeds_from_first(count: int) -> range:
    """Return the first `count` seeds, or with `BATON_FAULT_SEED=N` as many from that one on."""
    first = int(os.environ.get(_ALONE, "0"))
    return range(first, first + count)


@contextmanager
def named_seed(seed: int) -> Iterator[None]:
    """Add the seed of a schedule to an error that its run raises, as the variable that repeats it."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"{_ALONE}={seed}")
        raise

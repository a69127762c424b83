"""Garbage is collected less often while a process starts, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from baton.processes.garbage import rare_collections


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    """Python's own thresholds: a router that ran in this process has changed them."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_only_the_with_block_collects_less_often() -> None:
    before = gc.get_threshold()
    with suppress(ValueError), rare_collections():
        first, *others = gc.get_threshold()
        raise ValueError
    assert first > 10 * before[0]
    assert tuple(others) == before[1:]
    assert gc.get_threshold() == before


def test_whoever_collects_more_rarely_still_does() -> None:
    gc.set_threshold(10**6, 3, 4)
    with rare_collections():
        assert gc.get_threshold() == (10**6, 3, 4)

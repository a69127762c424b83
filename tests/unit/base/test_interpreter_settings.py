"""Garbage is collected less often while a process starts, and as before afterwards; threads take turns early."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from baton.processes.interpreter import rare_collections, switch_threads_early


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


def test_a_thread_that_computes_waits_less_than_a_decode_step_for_another() -> None:
    before = sys.getswitchinterval()
    try:
        switch_threads_early()
        assert sys.getswitchinterval() < 1e-3
    finally:
        sys.setswitchinterval(before)

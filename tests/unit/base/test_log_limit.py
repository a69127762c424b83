"""A lasting condition is logged once, and then once an interval with a count."""

from __future__ import annotations

import logging

import pytest

from baton.observe.log_limit import LimitedLog
from tests.doubles.fake_clock import FakeClock

_log = logging.getLogger("baton.test_log_limit")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_000.0)


@pytest.fixture
def limited(clock: FakeClock) -> LimitedLog:
    return LimitedLog(_log, logging.WARNING, 60.0, clock.monotonic)


def test_the_first_occurrence_is_logged_at_once_and_later_ones_are_counted(
    limited: LimitedLog, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    assert limited.happened("%s is cut off", "a")
    for _ in range(100_000):
        assert not limited.happened("%s is cut off", "b")
    assert caplog.messages == ["a is cut off"]
    clock.advance(60.0)
    assert limited.happened("%s is cut off", "c")
    assert caplog.messages[1:] == ["c is cut off (and 100000 more times in the last 60 s)"]


def test_rare_events_are_logged_each_time_without_a_count(
    limited: LimitedLog, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for peer in "ab":
        limited.happened("%s is cut off", peer)
        clock.advance(61.0)
    assert caplog.messages == ["a is cut off", "b is cut off"]


def test_the_end_of_a_condition_is_logged_once_and_the_next_one_at_once(
    limited: LimitedLog, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    limited.is_over("there are descriptors again")
    limited.happened("no descriptors")
    limited.happened("no descriptors")
    clock.advance(5.0)
    limited.is_over("there are descriptors again")
    limited.is_over("there are descriptors again")
    limited.happened("no descriptors")
    assert caplog.messages == [
        "no descriptors",
        "there are descriptors again (it happened 1 more times in the last 5 s)",
        "no descriptors",
    ]

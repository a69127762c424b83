"""The oldest generation is collected by a timer, in idle moments alone."""

from __future__ import annotations

from router.idle_collector import IDLE_REQUESTS, INTERVAL_S, IdleCollector
from router.timers import ManualTimers


class Collections:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return 0


def test_an_idle_router_collects_once_an_interval() -> None:
    timers, collections = ManualTimers(), Collections()
    collector = IdleCollector(timers, lambda: 0, collections)
    timers.advance(INTERVAL_S - 0.1)
    assert collections.count == 0
    timers.advance(10 * INTERVAL_S)
    assert collections.count == 10
    collector.stop()
    assert timers.num_pending == 0


def test_a_busy_router_waits_for_its_next_idle_moment() -> None:
    timers, collections = ManualTimers(), Collections()
    num_live = IDLE_REQUESTS + 1
    IdleCollector(timers, lambda: num_live, collections)
    timers.advance(10 * INTERVAL_S)
    assert collections.count == 0
    num_live = IDLE_REQUESTS
    timers.advance(1.0)
    assert collections.count == 1

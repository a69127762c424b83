"""The garbage collector runs by a timer, and earlier after memory has grown, only in idle moments."""

from __future__ import annotations

from router.operations.idle_collector import IDLE_REQUESTS, INTERVAL_S, IdleCollector
from tests.doubles.fake_timers import FakeTimers


class Collections:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return 0


def test_an_idle_router_collects_once_an_interval() -> None:
    timers, collections = FakeTimers(), Collections()
    collector = IdleCollector(timers, lambda: 0, collections, memory=lambda: 0)
    timers.advance(INTERVAL_S - 0.1)
    assert collections.count == 0
    timers.advance(10 * INTERVAL_S)
    assert collections.count == 10
    collector.close()
    assert timers.num_pending == 0


def test_a_busy_router_waits_for_its_next_idle_moment() -> None:
    timers, collections = FakeTimers(), Collections()
    num_live = IDLE_REQUESTS + 1
    IdleCollector(timers, lambda: num_live, collections, memory=lambda: 0)
    timers.advance(10 * INTERVAL_S)
    assert collections.count == 0
    num_live = IDLE_REQUESTS
    timers.advance(1.0)
    assert collections.count == 1


class Memory:
    """The memory of a process, of which a collection frees the unused part."""

    def __init__(self, used: int) -> None:
        self.used = used
        self.free = 0
        self.num_collections = 0

    def now(self) -> int:
        return self.used + self.free

    def collect(self) -> int:
        self.num_collections += 1
        self.free = 0
        return 0


def test_memory_freed_after_a_burst_is_returned_a_second_later() -> None:
    timers, memory = FakeTimers(), Memory(100)
    IdleCollector(timers, lambda: 0, memory.collect, memory=memory.now)
    timers.advance(1.0)
    assert memory.num_collections == 0
    memory.free = 50
    timers.advance(1.0)
    assert memory.now() == 100


def test_memory_in_use_is_not_scanned_every_second() -> None:
    timers, memory = FakeTimers(), Memory(100)
    IdleCollector(timers, lambda: 0, memory.collect, memory=memory.now)
    memory.used = 200
    timers.advance(INTERVAL_S - 1.0)
    assert memory.num_collections == 4  # after 1, 2, 4 and 8 seconds
    timers.advance(INTERVAL_S)
    assert memory.num_collections == 5


def test_memory_freed_after_a_scan_is_returned_before_the_interval_ends() -> None:
    timers, memory = FakeTimers(), Memory(100)
    IdleCollector(timers, lambda: 0, memory.collect, memory=memory.now)
    memory.used = 200
    timers.advance(2.0)
    memory.used, memory.free = 100, 100
    timers.advance(2.0)
    assert memory.now() == 100


def test_memory_that_grows_again_is_returned_again() -> None:
    timers, memory = FakeTimers(), Memory(200)
    IdleCollector(timers, lambda: 0, memory.collect, memory=memory.now)
    memory.used = 100
    timers.advance(1.0)
    memory.free = 50
    timers.advance(1.0)
    assert memory.now() == 100


def test_a_busy_router_keeps_its_free_memory_until_it_is_idle() -> None:
    timers, memory = FakeTimers(), Memory(100)
    num_live = IDLE_REQUESTS + 1
    IdleCollector(timers, lambda: num_live, memory.collect, memory=memory.now)
    memory.free = 100
    timers.advance(5.0)
    assert memory.num_collections == 0
    num_live = 0
    timers.advance(1.0)
    assert memory.now() == 100

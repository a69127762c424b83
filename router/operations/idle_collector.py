"""Full garbage collections in idle moments, started by a timer, after which free memory goes back to the system.

A full collection holds the event loop for as long as it takes to look at every object of every open stream, so a
router's thresholds (`set_thresholds`) keep the collector from ever starting one by itself. Baton's own objects are
freed without it; but a library may leave a cycle for each of its calls, and those that live past the younger
generations would stay for ever. Then freed memory goes back to the system: by itself glibc keeps memory that lies below
a piece that is in use, and with each large piece that is freed it maps fewer of them separately (mallopt(3),
malloc_trim(3)). If memory has grown, by many connections or large requests, that is done within a second, and not only
once an interval.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable

from baton.observe.process_figures import resident_bytes
from router.timers import TimerHandle, Timers

_log = logging.getLogger(__name__)

INTERVAL_S = 10.0
_LOOK_S = 1.0
GROWTH = 0.05
"""If memory grows by this share above the least of the interval, a collection runs before the interval ends."""
IDLE_REQUESTS = 16
"""With at most so many live requests, a pause of some milliseconds is acceptable."""
CONNECTIONS_LIKE_A_REQUEST = 64
"""So many open connections count as one request: the collector takes 20 ms for a thousand of them."""
_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""
_LARGE_BYTES = 128 << 10
"""Pieces of this size or more are mapped separately, and unmapped when they are freed."""
_LIBC = ctypes.CDLL(None)


def set_thresholds() -> None:
    """Set the collector's thresholds: young objects are collected often, older ones rarely, all together never.

    With glibc, also let large pieces of memory go back to the system as soon as they are freed. The middle generation
    holds at most about 120,000 objects (six times 20,000 young ones). Many new connections fill it, and a collection of
    it holds the event loop.
    """
    gc.set_threshold(20_000, 5, 4_000)
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def collect_and_trim() -> int:
    """Collect all generations and give free memory back to the system; returns how many objects were freed."""
    num_freed = gc.collect()
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
    return num_freed


class IdleCollector:
    """Collects all generations in an idle moment, once an interval and when memory has grown. Runs until `stop`."""

    def __init__(
        self,
        timers: Timers,
        num_live: Callable[[], int],
        collect: Callable[[], int] = collect_and_trim,
        interval_s: float = INTERVAL_S,
        memory: Callable[[], int] = resident_bytes,
    ) -> None:
        """`num_live` returns the number of live requests, `collect` the number of freed objects, and `memory` the
        bytes of memory that the process uses.
        """
        self._timers = timers
        self._num_live = num_live
        self._collect = collect
        self._interval_s = interval_s
        self._memory = memory
        self._least = memory()
        """The fewest bytes of memory since the interval began."""
        self._due = timers.monotonic() + interval_s
        """When the interval ends."""
        self._pause_s = _LOOK_S
        """The pause after a collection for growth; it doubles each time, since the memory may simply be in use."""
        self._next_growth_check = timers.monotonic()
        self._timer: TimerHandle = timers.call_at(timers.monotonic() + _LOOK_S, self._look)

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._num_live() <= IDLE_REQUESTS:
            self._give_back(self._timers.monotonic(), self._memory())
        self._timer = self._timers.call_at(self._timers.monotonic() + _LOOK_S, self._look)

    def _give_back(self, now: float, memory: int) -> None:
        self._least = min(self._least, memory)
        if now >= self._due:
            num_freed = self._collect()
            _log.debug("the collector freed %d objects in %.3f s", num_freed, self._timers.monotonic() - now)
            self._due = now + self._interval_s
            self._least = self._memory()
        elif memory <= self._least * (1 + GROWTH):
            self._pause_s = _LOOK_S
        elif now >= self._next_growth_check:
            self._collect()
            self._next_growth_check = now + self._pause_s
            self._pause_s *= 2

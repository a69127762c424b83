"""Memory that a router gives back: all generations of garbage are looked through by a timer, when little is to do.

A full collection holds the event loop for as long as it takes to look at every object of every open stream, so a
router's thresholds (`set_thresholds`) keep the collector from ever starting one by itself. Baton's own objects are
freed without it; but a library may leave a cycle for each of its calls, and those that live past the younger
generations would stay for ever. What is freed then goes back to the system: glibc keeps what lies below a piece that is
in use, and with each large piece that is freed it maps fewer by themselves (mallopt(3), malloc_trim(3)). Where memory
has grown, by a crowd of connections or of large requests, that is done a second later, and not only once an interval.
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
"""By so much the process may grow above the least that it had in an interval before that is over."""
IDLE_REQUESTS = 16
"""With no more than so many live requests a pause of some milliseconds disturbs nobody."""
CONNECTIONS_LIKE_A_REQUEST = 64
"""Open connections that count as one: a thousand of them take the collector 20 ms to look at."""
_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""
_LARGE_BYTES = 128 << 10
"""Pieces of this size and more are mapped alone, and unmapped when they are freed."""
_LIBC = ctypes.CDLL(None)


def set_thresholds() -> None:
    """Let the collector look at what is young, rarely at what is older, and practically never at everything; and let
    large pieces of memory go back to the system as soon as they are freed, where the C library is glibc.

    The middle generation holds about 120,000 objects at most (six young ones of 20,000). A crowd of new connections
    fills it, and the loop is held while the collector looks at all of it.
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
        """`num_live`: how many requests there are now. `collect` returns how many objects it has freed; `memory`: bytes
        that the process has now.
        """
        self._timers = timers
        self._num_live = num_live
        self._collect = collect
        self._interval_s = interval_s
        self._memory = memory
        self._least = memory()
        """Bytes: the least that was seen since the interval began."""
        self._due = timers.monotonic() + interval_s
        """When the interval ends."""
        self._pause_s = _LOOK_S
        """After a collection because of growth; each is twice the one before, since what is in use may stay so."""
        self._next_of_growth = timers.monotonic()
        self._timer: TimerHandle = timers.call_at(timers.monotonic() + _LOOK_S, self._look)

    def stop(self) -> None:
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
        elif now >= self._next_of_growth:
            self._collect()
            self._next_of_growth = now + self._pause_s
            self._pause_s *= 2

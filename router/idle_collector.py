"""Memory that a router gives back: all generations of garbage are looked through by a timer, when little is to do.

A full collection holds the event loop for as long as it takes to look at every object of every open stream, so a
router's thresholds (`set_thresholds`) keep the collector from ever starting one by itself. Baton's own objects are
freed without it; but a library may leave a cycle for each of its calls, and those that live past the younger
generations would stay for ever. What is freed then goes back to the system: glibc keeps what lies below a piece that is
in use, and with each large piece that is freed it maps fewer by themselves (mallopt(3), malloc_trim(3)).
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable

from router.timers import TimerHandle, Timers

_log = logging.getLogger(__name__)

INTERVAL_S = 10.0
_RETRY_S = 1.0
IDLE_REQUESTS = 16
"""With no more than so many live requests a pause of some milliseconds disturbs nobody."""


_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""
_LARGE_BYTES = 128 << 10
"""Pieces of this size and more are mapped alone, and unmapped when they are freed."""


def set_thresholds() -> None:
    """Let the collector look at what is young, rarely at what is older, and practically never at everything; and let
    large pieces of memory go back to the system as soon as they are freed, where the C library is glibc."""
    gc.set_threshold(20_000, 20, 1_000)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def collect_and_trim() -> int:
    """Collect all generations and give free memory back to the system; returns how many objects were freed."""
    num_freed, libc = gc.collect(), ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return num_freed


class IdleCollector:
    """Collects all generations once an interval, in the first idle moment after it. Runs until `stop`."""

    def __init__(
        self,
        timers: Timers,
        num_live: Callable[[], int],
        collect: Callable[[], int] = collect_and_trim,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`num_live`: how many requests there are now. `collect` returns how many objects it has freed."""
        self._timers = timers
        self._num_live = num_live
        self._collect = collect
        self._interval_s = interval_s
        self._timer: TimerHandle = timers.call_at(timers.monotonic() + interval_s, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        wait_s = _RETRY_S
        if self._num_live() <= IDLE_REQUESTS:
            begun = self._timers.monotonic()
            num_freed = self._collect()
            _log.debug("the collector freed %d objects in %.3f s", num_freed, self._timers.monotonic() - begun)
            wait_s = self._interval_s
        self._timer = self._timers.call_at(self._timers.monotonic() + wait_s, self._look)

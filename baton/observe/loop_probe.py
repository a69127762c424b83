"""Measures how long an event loop is held: while the callbacks of one turn run, no socket is read and no timer fires.

A turn is everything between two calls of `select`. Each turn is measured where it begins and where it ends; nothing is
sampled. Two clocks are read: real time, which is what clients and peers notice, and the thread's processor time, which
does not count the time that the system gave to others. A turn that is long by the first clock and short by the second
was not held by this process's own work: the machine was busy, or another thread had the interpreter.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Iterator
from typing import Any

from baton.observe.metrics import Distribution, Figure, Histogram

HELD_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
WINDOW_S = 60.0
"""A scraper that asks at least this often sees the longest of all turns."""
_SHORT_S = HELD_BUCKETS_S[0]
"""Shorter turns, which are nearly all, are only counted: reading the processor's clock would cost too much of them."""
_CPU_READING_S = 0.005
"""How old a reading of the processor's clock may be when a turn begins, and so how much too long a turn may seem."""

READY_AT_ONCE = 512
"""The most descriptors that are served in one turn: when four thousand clients leave at one moment, serving all of them
at once would hold the loop."""


class Longest:
    """The largest value of the current window and the one before it."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._current = self._previous = 0.0
        self._since = 0.0

    def observe(self, now: float, value: float) -> None:
        """Take a value. `now`: seconds on a monotonic clock."""
        self._turn_over(now)
        self._current = max(self._current, value)

    def value(self, now: float) -> float:
        """The largest value; 0 if there was none."""
        self._turn_over(now)
        return max(self._current, self._previous)

    def _turn_over(self, now: float) -> None:
        past = (now - self._since) // self._window_s
        if past >= 1:
            self._previous = self._current if past == 1 else 0.0
            self._current = 0.0
            self._since += past * self._window_s


class LoopProbe:
    """Measures the turns of one event loop; belongs to the loop's thread. A turn costs less than a microsecond."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        """`clock` returns seconds of real time, `cpu_clock` seconds of processor time of the calling thread."""
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._held = Histogram(HELD_BUCKETS_S)
        self._held_cpu = Histogram(HELD_BUCKETS_S)
        self._longest = Longest(WINDOW_S)
        self._longest_cpu = Longest(WINDOW_S)
        self._num_short = 0
        self._short_s = 0.0
        self._began: float | None = None
        self._cpu_read_at = -_CPU_READING_S
        self._cpu_s = 0.0
        """The processor's clock at `_cpu_read_at`."""

    def begin_turn(self) -> None:
        """`select` has returned, and the loop runs what is ready."""
        self._began = now = self._clock()
        if now - self._cpu_read_at >= _CPU_READING_S:
            self._cpu_read_at, self._cpu_s = now, self._cpu_clock()

    def end_turn(self) -> None:
        """All of it has run, and the loop is about to call `select`."""
        if self._began is None:
            return
        now = self._clock()
        held, self._began = now - self._began, None
        if held < _SHORT_S:
            self._num_short += 1
            self._short_s += held
            return
        cpu = min(held, self._cpu_clock() - self._cpu_s)
        self._held.observe(held)
        self._held_cpu.observe(cpu)
        self._longest.observe(now, held)
        self._longest_cpu.observe(now, cpu)

    def figures(self) -> Iterator[Figure | Distribution]:
        """The metrics, for the metrics page."""
        if self._num_short:
            for histogram in (self._held, self._held_cpu):
                histogram.observe(self._short_s / self._num_short, self._num_short)
            self._num_short, self._short_s = 0, 0.0
        text = "How long one turn of the event loop took, in which it looked at no socket and no timer."
        yield self._held.now("event_loop_held_seconds", text)
        yield self._held_cpu.now("event_loop_held_cpu_seconds", f"{text} Processor time of its thread alone.")
        now, text = self._clock(), f"The longest turn of the event loop in the last {WINDOW_S:.0f} seconds or more."
        yield Figure("event_loop_held_seconds_max", text, self._longest.value(now), {})
        text = f"{text} Processor time of its thread alone."
        yield Figure("event_loop_held_cpu_seconds_max", text, self._longest_cpu.value(now), {})


class _BoundedPoll:
    """An epoll object that returns at most READY_AT_ONCE descriptors at a time. The kernel begins with the others when
    it is asked again, so none waits for ever.
    """

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        ready: list[tuple[int, int]] = self._real.poll(timeout, min(maxevents, READY_AT_ONCE))
        return ready


class _ProbedSelector(selectors.DefaultSelector):
    """A selector that tells a probe when turns of the loop begin and end."""

    def __init__(self, probe: LoopProbe) -> None:
        super().__init__()
        self._begin, self._end = probe.begin_turn, probe.end_turn
        if hasattr(selectors, "EpollSelector"):
            self._selector: Any = _BoundedPoll(self._selector)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._end()
        try:
            return super().select(timeout)
        finally:
            self._begin()


class ProbedEventLoop(asyncio.SelectorEventLoop):
    """asyncio's event loop with a `LoopProbe` of its own."""

    def __init__(self) -> None:
        self.probe = LoopProbe()
        super().__init__(_ProbedSelector(self.probe))

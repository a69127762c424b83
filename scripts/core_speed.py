"""Measures how fast each core is while something else is measured.

A rented core is often one hardware thread of a core whose other thread belongs to another tenant. While that one
computes, the same work takes 1.7 times as long, which the operating system does not show.

Run as a program it times a short loop of plain Python on one core, twice a second, in processor time. That grows when
the core is shared below the operating system, but not when this process waits for its turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_EVERY_S = 0.5
_STEPS = 40_000


@contextmanager
def measured_cores(speeds: dict[int, list[float]]) -> Iterator[None]:
    """Times the loop on each usable core during the context; `speeds` gets the milliseconds of processor time."""
    cores = sorted(os.sched_getaffinity(0))
    watchers = [subprocess.Popen([sys.executable, __file__, str(core)], stdout=subprocess.PIPE) for core in cores]
    try:
        for core, watcher in zip(cores, watchers, strict=True):
            assert watcher.stdout is not None
            speeds[core] = [float(watcher.stdout.readline())]
        yield
    finally:
        for core, watcher in zip(cores, watchers, strict=True):
            watcher.terminate()
            output, _ = watcher.communicate()
            speeds.setdefault(core, []).extend(float(line) for line in output.split())


def describe(speeds: dict[int, list[float]]) -> str:
    """The measured times as text, to explain why a figure may differ from an earlier one."""
    cores = [f"{_median(taken):.1f} [{min(taken):.1f}, {max(taken):.1f}] ms on core {c}" for c, taken in speeds.items()]
    return f"a fixed loop of plain Python took {' and '.join(cores)} meanwhile"


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _loop_ms() -> float:
    table, value = {}, 0
    began = time.process_time()
    for step in range(_STEPS):
        value = (value * 31 + step) & 0xFFFF
        table[value & 1023] = step
    return (time.process_time() - began) * 1e3


def _watch(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        print(round(_loop_ms(), 3), flush=True)
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    _watch(int(sys.argv[1]))

"""How fast each core is while something else is measured: a rented core is often half of one, and of whose other half
somebody else makes use one second and not the next. The same work then takes 1.7 times as long, and no clock says so.

Run as a program it times a short loop of plain Python on one core, twice a second, in processor time: that grows when
the core is shared below the operating system, and not when this process waits for its turn.
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
def watched(speeds: dict[int, list[float]]) -> Iterator[None]:
    """On exit `speeds` has what the loop took on each usable core, in milliseconds of processor time."""
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
            said, _ = watcher.communicate()
            speeds.setdefault(core, []).extend(float(line) for line in said.split())


def described(speeds: dict[int, list[float]]) -> str:
    """In words, for a reader who wonders why a figure is not what it was."""
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

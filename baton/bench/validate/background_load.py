"""Measures how much of this machine's cores other processes use during a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MOMENT_S = 0.5


class BackgroundLoad(Protocol):
    """CPU use of all processes that are neither the cluster's nor this one."""

    def mark(self) -> None:
        """Starts counting."""
        ...

    def share(self) -> float:
        """Share of the cores' time since `mark`, 0 to 1."""
        ...

    def watch(self) -> float:
        """Waits for a moment without a measurement, and returns the share of the cores' time in it."""
        ...


class ProcBackgroundLoad:
    """Reads /proc: the time that all cores were busy, minus that of the cluster and of this process."""

    def __init__(self, pids: Sequence[int], cores: Collection[int], read: Callable[[str], str] | None = None) -> None:
        """`pids`: the cluster's processes. `read`: reads a file under /proc. This process and its children that have
        ended are not background load either."""
        self._pids = [*pids, os.getpid()]
        self._cores = cores
        self._read = read or (lambda name: (Path("/proc") / name).read_text(encoding="utf-8"))
        self._marked = (0.0, 0, 0)
        self.mark()

    def mark(self) -> None:
        self._marked = self._now()

    def share(self) -> float:
        (then_s, busy_then, own_then), (now_s, busy, own) = self._marked, self._now()
        ticks = max(1.0, (now_s - then_s) * _TICKS_PER_S) * len(self._cores)
        return min(1.0, max(0.0, (busy - busy_then) - (own - own_then)) / ticks)

    def watch(self) -> float:
        self.mark()
        time.sleep(_MOMENT_S)
        return self.share()

    def _now(self) -> tuple[float, int, int]:
        own = 0
        for pid in self._pids:
            with suppress(OSError):
                own += process_ticks(self._read(f"{pid}/stat"))
        return time.monotonic(), busy_ticks(self._read("stat"), self._cores), own


def busy_ticks(stat: str, cores: Collection[int]) -> int:
    """Ticks that these cores were busy, from /proc/stat; with time that a hypervisor gave to other guests."""
    busy = 0
    for line in stat.splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = map(int, values[:8])
            busy += user + nice + system + interrupts + soft_interrupts + stolen
    return busy


def process_ticks(stat: str) -> int:
    """CPU ticks of a process and of its children that were waited for, from /proc/PID/stat (proc(5))."""
    # A command's name may contain anything, also brackets and blanks.
    values = stat.rpartition(")")[2].split()
    return sum(map(int, values[11:15]))

"""How much of this machine's cores is taken by others while something is measured: that is in nobody's formula."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MOMENT_S = 0.5


class Strangers(Protocol):
    """Whoever is neither the cluster nor this process."""

    def mark(self) -> None:
        """From now on it is counted."""
        ...

    def share(self) -> float:
        """Of the cores' time since `mark`, 0 to 1."""
        ...

    def watch(self) -> float:
        """Of the cores' time in a moment in which nothing is measured; returns when it is over."""
        ...


class ProcStrangers:
    """By Linux's accounts of its cores and of those processes that are no strangers."""

    def __init__(self, pids: Sequence[int], cores: Collection[int], read: Callable[[str], str] | None = None) -> None:
        """`pids`: besides this process and its children that ended; `read`: of a file under /proc."""
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
    """Of /proc/stat: what these cores were not idle; with what a hypervisor gave to others."""
    busy = 0
    for line in stat.splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = map(int, values[:8])
            busy += user + nice + system + interrupts + soft_interrupts + stolen
    return busy


def process_ticks(stat: str) -> int:
    """Of /proc/PID/stat: what the process used, with its children that were waited for."""
    # A command's name may have anything in it, also brackets and blanks.
    values = stat.rpartition(")")[2].split()
    return sum(map(int, values[11:15]))

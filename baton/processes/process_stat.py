"""What the kernel says of a process in /proc/PID/stat (proc_pid_stat(5))."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATE, _PARENT, _TIMES, _NUM_THREADS, _START, _ARGUMENTS = 0, 1, 11, 17, 19, 45
"""Positions after the name of the command."""


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The file's fields after the name of the command."""

    fields: list[str]

    @staticmethod
    def parse(text: str) -> ProcessStat:
        # A command's name may contain anything, also brackets and blanks.
        return ProcessStat(text.rpartition(")")[2].split())

    @property
    def state(self) -> str:
        """A letter, such as R (runs), S (sleeps), T (is stopped) and Z (has ended, and its parent has not noticed)."""
        return self.fields[_STATE]

    @property
    def has_ended(self) -> bool:
        return self.state in ("Z", "X")

    @property
    def parent(self) -> int:
        return int(self.fields[_PARENT])

    @property
    def cpu_ticks(self) -> int:
        """Processor time of all threads, in ticks."""
        return sum(map(int, self.fields[_TIMES : _TIMES + 2]))

    @property
    def cpu_s(self) -> float:
        """Processor time of all threads, in seconds."""
        return self.cpu_ticks / TICKS_PER_S

    @property
    def cpu_ticks_with_children(self) -> int:
        """The same in ticks, with the time of children that ended and were waited for."""
        return sum(map(int, self.fields[_TIMES : _TIMES + 4]))

    @property
    def num_threads(self) -> int:
        return int(self.fields[_NUM_THREADS])

    @property
    def start_ticks(self) -> int:
        """When the process started, in ticks since boot: with its id this identifies it for ever."""
        return int(self.fields[_START])

    @property
    def arguments(self) -> tuple[int, int]:
        """Start and end of the command line in the process's memory."""
        return int(self.fields[_ARGUMENTS]), int(self.fields[_ARGUMENTS + 1])


def process_stat(pid: int, proc: Path = PROC) -> ProcessStat:
    """Reads the file of a process; raises OSError if there is no such process, or no /proc."""
    return ProcessStat.parse((proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace"))

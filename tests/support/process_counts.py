"""Counts the descriptors, by kind, and the threads of processes, from /proc."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.cli.cluster.state import ProcessState


@dataclass(frozen=True, slots=True)
class Holdings:
    """The descriptors and threads of one process."""

    threads: int
    descriptors: Counter[str] = field(default_factory=Counter)
    """The number of descriptors by kind: socket, pipe, anon_inode:[eventpoll], file, ..."""

    def counted(self) -> Counter[str]:
        """Return descriptors by kind together with threads."""
        return self.descriptors + Counter({"thread": self.threads})


def holdings(pid: int) -> Holdings:
    """Return what a process holds now. Raises FileNotFoundError if it has ended."""
    kinds: Counter[str] = Counter()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except FileNotFoundError:
            continue
        kinds["file" if target.startswith("/") else target.partition(":[")[0].partition("[")[0] or target] += 1
    return Holdings(len(os.listdir(f"/proc/{pid}/task")), kinds)


def by_role(processes: Iterable[ProcessState]) -> dict[str, Holdings]:
    """Return the most that any process of each role holds, kind by kind."""
    most: dict[str, Holdings] = {}
    for process in processes:
        held, known = holdings(process.pid), most.get(process.role, Holdings(0))
        most[process.role] = Holdings(max(held.threads, known.threads), held.descriptors | known.descriptors)
    return most


def shared_memory_segments() -> list[str]:
    """The segments of shared memory on this machine, but those of UCX: other tests' nodes make and end these."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith("ucx_"))

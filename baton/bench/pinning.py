"""Pins node processes to cores, with the processes of a node's other ranks."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from baton.messages.operator import NodeStatus

_PROC = Path("/proc")
_PARENT = 1
"""Position in /proc/PID/stat after the name of the command (proc_pid_stat(5))."""


def pin_nodes(nodes: Sequence[NodeStatus], cores: Sequence[int], per_node: int = 1) -> dict[str, int]:
    """Pins each node to `per_node` of the cores, in turn, so that every arrangement has the same cores.

    Returns the first core of each node, by the node's name.
    """
    placed = {}
    for number, node in enumerate(sorted(nodes, key=lambda node: node.name)):
        own = [cores[place % len(cores)] for place in range(number * per_node, (number + 1) * per_node)]
        for pid in processes_of([node.pid]):
            _pin(pid, own)
        placed[node.name] = own[0]
    return placed


def processes_of(pids: Collection[int]) -> list[int]:
    """These processes and all that they have started, directly or not: the ranks of nodes, say."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in _PROC.iterdir():
        if path.name.isdigit():
            with suppress(OSError):  # it has ended
                fields = (path / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                children[int(fields[_PARENT])].append(int(path.name))
    found: dict[int, None] = {}
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found[pid] = None
            waiting += children[pid]
    return list(found)


def _pin(pid: int, cores: Collection[int]) -> None:
    """Pins all threads of a process; threads that start later inherit it."""
    pinned: set[str] = set()
    while True:
        try:
            tasks = {path.name for path in (_PROC / str(pid) / "task").iterdir()}
        except FileNotFoundError:  # it has ended
            return
        if tasks <= pinned:
            return
        for task in tasks - pinned:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), cores)
        pinned |= tasks

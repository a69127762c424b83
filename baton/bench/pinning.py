"""Pins node processes to cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from baton.messages.cluster import NodeStatus


def pin_nodes(nodes: Sequence[NodeStatus], cores: Sequence[int]) -> dict[str, int]:
    """Pins each node to one of the cores, in turn, so that every arrangement has the same cores.

    Returns the core of each node, by the node's name.
    """
    placed = {}
    for number, node in enumerate(sorted(nodes, key=lambda node: node.name)):
        core = cores[number % len(cores)]
        _pin(node.pid, core)
        placed[node.name] = core
    return placed


def _pin(pid: int, core: int) -> None:
    """Pins all threads of a process; threads that start later inherit it."""
    pinned: set[str] = set()
    while True:
        tasks = {path.name for path in Path(f"/proc/{pid}/task").iterdir()}
        if tasks <= pinned:
            return
        for task in tasks - pinned:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), {core})
        pinned |= tasks

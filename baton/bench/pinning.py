"""Processes on cores of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from baton.messages.cluster import NodeStatus


def pin_nodes(nodes: Sequence[NodeStatus], cores: Sequence[int]) -> dict[str, int]:
    """Give each node one core, in turn; returns which by name. Every arrangement then has the same cores."""
    placed = {}
    for number, node in enumerate(sorted(nodes, key=lambda node: node.name)):
        core = cores[number % len(cores)]
        _pin(node.pid, core)
        placed[node.name] = core
    return placed


def _pin(pid: int, core: int) -> None:
    """All threads; those that come later inherit it."""
    pinned: set[str] = set()
    while True:
        tasks = {path.name for path in Path(f"/proc/{pid}/task").iterdir()}
        if tasks <= pinned:
            return
        for task in tasks - pinned:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), {core})
        pinned |= tasks

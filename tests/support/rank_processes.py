"""The processes of a node's ranks, found as the kernel knows them, and what a host has in shared memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from baton.processes.process_stat import process_stat

_RANK = "baton.runner.ranks.rank_process"
_STAGE = "baton.stage.process"
_GONE = (FileNotFoundError, ProcessLookupError)
_BOUND_S = 100.0
_PAUSE_S = 0.05
SHARED_MEMORY = Path("/dev/shm")


def rank_processes(pid: int) -> list[int]:
    """Return the processes of the other ranks and stages of the node with this process; empty if it is gone.

    A stage has started its other ranks itself.
    """
    ranks: list[int] = []
    with suppress(*_GONE):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                if {_RANK, _STAGE} & set(command(child)):
                    ranks += [child, *rank_processes(child)]
    return sorted(ranks)


def command(pid: int) -> list[str]:
    """Return the words of a process's command line; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except _GONE:
        return []


def channel_of(rank_pid: int) -> int:
    """Return the descriptor with which the process of a rank or stage is connected to the one that leads it."""
    words = command(rank_pid)
    if _STAGE in words:
        return int(json.loads(words[words.index(_STAGE) + 1])["descriptors"][0])
    return int(words[words.index(_RANK) + 3])


def alive(pids: Iterable[int]) -> list[int]:
    """Return those of these processes that have not ended."""
    return [pid for pid in pids if _state(pid) not in ("", "Z")]


def _state(pid: int) -> str:
    """The state of a process, as a letter; empty if it is gone. Nobody may ever reap an orphan, whose state is Z."""
    try:
        return process_stat(pid).state
    except _GONE:
        return ""


def wait_until_gone(pids: Iterable[int]) -> None:
    """Wait until these processes have ended, whatever their parent. Raises AssertionError."""
    left, deadline = alive(pids), time.monotonic() + _BOUND_S
    while left:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(_PAUSE_S)
        left = alive(left)


def orphaned_segments() -> set[str]:
    """Return the names in /dev/shm that no process has open or mapped: nobody would remove them."""
    names = {entry.name for entry in os.scandir(SHARED_MEMORY)}
    if not names:
        return set()
    used = {path for pid in os.listdir("/proc") if pid.isdigit() for path in _files_of(pid)}
    return {name for name in names if str(SHARED_MEMORY / name) not in used}


_LOOKS = 1000
"""At /dev/shm and all processes, each of which takes some milliseconds."""


def require_none_orphaned(before: set[str]) -> None:
    """Assert that no segments are orphaned but those of `before`.

    One that a process of another test is just making is nobody's for a moment.
    """
    for _ in range(_LOOKS):
        if orphaned_segments() <= before:
            return
    assert orphaned_segments() <= before


def _files_of(pid: str) -> Iterator[str]:
    # Processes of others may not be looked into, and any may end meanwhile.
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            yield line[73:]
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{descriptor}")

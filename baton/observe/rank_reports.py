"""The processes that compute a node's model, as the kernel accounts for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from baton.messages.node_report import RankReport
from baton.processes.process_stat import PROC, process_stat


def rank_reports(rank_pids: Sequence[int], proc: Path = PROC) -> list[RankReport]:
    """Reports on this process and the ranks beside it on this host, in order; empty if there are none beside it."""
    if not rank_pids:
        return []
    return [rank_report(rank, pid, proc) for rank, pid in enumerate((os.getpid(), *rank_pids))]


def rank_report(rank: int, pid: int, proc: Path = PROC) -> RankReport:
    """The report on a rank in a process of this host."""
    try:
        stat = process_stat(pid, proc)
        lines = (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return RankReport(rank, pid, is_up=False)
    if stat.has_ended:
        return RankReport(rank, pid, is_up=False)
    status = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return RankReport(
        rank,
        pid,
        is_up=True,
        resident_bytes=_bytes(status, "VmRSS"),
        shared_bytes=_bytes(status, "RssShmem"),
        cpu_s=stat.cpu_s,
        num_threads=int(status.get("Threads", 0)),
    )


def _bytes(status: dict[str, str], name: str) -> int:
    """A field of /proc/PID/status, such as `VmRSS:   1234 kB` (proc_pid_status(5)); 0 without it."""
    number = status.get(name, "").split()[:1]
    return int(number[0]) * 1024 if number else 0

"""The processes that compute a node's model, as the kernel accounts for them: for operators and the metrics page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.messages.node_report import RankReport
from baton.observe.metrics import Figure

_UTIME, _STIME = 11, 12
"""Positions in /proc/PID/stat after the name of the command (proc_pid_stat(5))."""
_ENDED = ("Z", "X")


def rank_reports(rank_pids: Sequence[int], proc: Path = Path("/proc")) -> list[RankReport]:
    """Reports on this process and the ranks beside it, in order; empty if there are none beside it."""
    if not rank_pids:
        return []
    return [_report(rank, pid, proc / str(pid)) for rank, pid in enumerate((os.getpid(), *rank_pids))]


def rank_figures(reports: Sequence[RankReport]) -> Iterator[Figure]:
    """The metrics of the ranks, for the metrics page."""
    for one in reports:
        for name, text, value in (
            ("rank_up", "Whether the process of a rank runs: 1 or 0.", one.is_up),
            ("rank_resident_memory_bytes", "Memory of a rank in use, its shared memory included.", one.resident_bytes),
            ("rank_shared_memory_bytes", "Memory that a rank shares with the node's others.", one.shared_bytes),
            ("rank_cpu_seconds_total", "Processor time of all threads of a rank.", one.cpu_s),
            ("rank_threads", "Threads of a rank.", one.num_threads),
        ):
            yield Figure(name, text, float(value), {"rank": str(one.rank)})


def _report(rank: int, pid: int, process: Path) -> RankReport:
    try:
        stat = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        lines = (process / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return RankReport(rank, pid, is_up=False)
    if stat[0] in _ENDED:
        return RankReport(rank, pid, is_up=False)
    status = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return RankReport(
        rank,
        pid,
        is_up=True,
        resident_bytes=_bytes(status, "VmRSS"),
        shared_bytes=_bytes(status, "RssShmem"),
        cpu_s=(int(stat[_UTIME]) + int(stat[_STIME])) / os.sysconf("SC_CLK_TCK"),
        num_threads=int(status.get("Threads", 0)),
    )


def _bytes(status: dict[str, str], name: str) -> int:
    """A field of /proc/PID/status, such as `VmRSS:   1234 kB` (proc_pid_status(5)); 0 without it."""
    number = status.get(name, "").split()[:1]
    return int(number[0]) * 1024 if number else 0

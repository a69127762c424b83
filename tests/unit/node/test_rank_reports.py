"""What a node says of the processes that compute its model."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from baton.messages.node_report import RankReport
from baton.node.reports.figures import rank_figures
from baton.observe.rank_reports import rank_reports
from tests.support.process_cluster import wait_until_ended


def test_a_node_of_one_rank_reports_none() -> None:
    assert rank_reports([]) == []


def test_running_and_ended_ranks(tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        own, other, nobody = rank_reports([process.pid, 2**22 + 1])
        assert (own.rank, own.pid, own.is_up) == (0, os.getpid(), True)
        assert own.resident_bytes > 10 << 20
        assert 0 < own.cpu_s <= time.process_time() + 1
        assert own.num_threads >= 1
        assert (other.rank, other.pid, other.is_up, other.num_threads) == (1, process.pid, True, 1)
        assert nobody == RankReport(2, 2**22 + 1, is_up=False)
        assert process.stdin is not None
        wait_until_ended([process.pid], process.stdin.close)
        # The process has ended, and its parent has not asked how: it has an entry, and no memory.
        assert rank_reports([process.pid])[1] == RankReport(1, process.pid, is_up=False)


def test_figures_of_the_kernel(tmp_path: Path) -> None:
    for pid in (os.getpid(), 5):
        (tmp_path / str(pid)).mkdir()
        ticks = os.sysconf("SC_CLK_TCK")
        fields = ["S", *["1"] * 10, str(3 * ticks), str(4 * ticks), *["0"] * 30]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b (c) {' '.join(fields)}\n")
    status = "Name:\ta) b (c\nVmRSS:\t    3000 kB\nRssAnon:\t  1000 kB\nRssShmem:\t  1500 kB\nThreads:\t4\n"
    (tmp_path / "5" / "status").write_text(status)
    (tmp_path / str(os.getpid()) / "status").write_text("Name:\tpython\n")
    own, other = rank_reports([5], tmp_path)
    assert own == RankReport(0, os.getpid(), is_up=True, cpu_s=7.0)
    assert other == RankReport(1, 5, True, 3000 * 1024, 1500 * 1024, 7.0, 4)
    figures = {(one.name, one.labels["rank"]): one.value for one in rank_figures([own, RankReport(1, 5, False)])}
    assert (figures["rank_up", "0"], figures["rank_up", "1"]) == (1.0, 0.0)
    assert figures["rank_cpu_seconds_total", "0"] == 7.0

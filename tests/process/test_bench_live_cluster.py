"""Clusters of benchmarks end with the process group of the benchmark, also one that is killed while they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.process.shell import ROOT, Shell

START = """
from baton.bench.live_cluster import live_clusters
with live_clusters(["--runner", "simulated"], ["--runner", "simulated"]):
    pass
"""


def test_no_cluster_outlives_a_benchmark_that_is_killed_while_it_starts(shell: Shell) -> None:
    environment = {**shell.environment, "PYTHONPATH": str(ROOT), "TMPDIR": str(shell.home)}
    started = subprocess.Popen([sys.executable, "-c", START], env=environment, cwd=shell.home, process_group=0)
    try:
        shell.wait_for_process("redis-server")
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    shell.assert_nothing_left()

"""Clusters of benchmarks end with their benchmark, also one that is killed while they start."""

from __future__ import annotations

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
    started = subprocess.Popen([sys.executable, "-c", START], env=environment, cwd=shell.home)
    try:
        shell.wait_for_process("redis-server")
    finally:
        started.kill()
        started.wait()
    shell.assert_nothing_left()

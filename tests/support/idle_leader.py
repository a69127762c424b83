"""A process that starts ranks or stages and does nothing more: `python -m tests.support.idle_leader TP PP MODEL`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.processes.fork_server import ForkedProcess
from baton.runner.loading import load_runner
from baton.runner.spec import TorchSpec
from tests.support.forked_commands import fork_server

_THIS = "tests.support.idle_leader"


def ranks_of_killed_leader(tp: int, pp: int, model: Path) -> list[int]:
    """Start the leader of `pp` stages of `tp` ranks, and kill it; returns the other processes."""
    command = [sys.executable, "-m", _THIS, str(tp), str(pp), str(model)]
    read_end, write_end = os.pipe()
    server = fork_server()
    with open(read_end) as output:
        try:
            leader: subprocess.Popen[bytes] | ForkedProcess | None
            if server is None:
                leader = subprocess.Popen(command, stdout=write_end)
            else:
                leader = server.fork(command, {1: write_end, 2: 2}, {}, has_fork_server=True)
            assert leader is not None, "the fork server of the tests does not answer"
        finally:
            os.close(write_end)
        pids = [int(pid) for pid in output.readline().split()]
        leader.kill()
        leader.wait()
    return pids


def main(arguments: Sequence[str]) -> int:
    """Load, print the process ids of the others, and wait to be killed."""
    tp, pp, model = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    spec = TorchSpec(model, dtype="float32", num_blocks=16, tensor_parallel=tp, pipeline_parallel=pp)
    runner = load_runner(spec)
    pids = [report.pid for report in runner.rank_reports()[1:]]
    os.write(1, (" ".join(map(str, pids)) + "\n").encode())
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

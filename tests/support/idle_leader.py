"""A process that starts ranks or stages and does nothing more: `python -m tests.support.idle_leader KIND MODEL`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.processes.fork_server import ForkedProcess
from baton.runner.loading import load_runner
from baton.runner.remote_stages.stages_here import start_on
from baton.runner.spec import TorchSpec
from tests.support.forked_commands import fork_server

_THIS = "tests.support.idle_leader"


def ranks_of_killed_leader(kind: str, model: Path) -> list[int]:
    """Start a leader of two `ranks` or `stages`, and kill it; returns the processes that it had started."""
    command = [sys.executable, "-m", _THIS, kind, str(model)]
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
    kind, model = arguments[0], Path(arguments[1])
    if kind == "ranks":
        runner = load_runner(TorchSpec(model, dtype="float32", num_blocks=16, tensor_parallel=2))
    else:
        stages = start_on(["cpu"], model, 1)
        runner = load_runner(TorchSpec(model, dtype="float32", num_blocks=16, pipeline_parallel=2), stages=stages)
    pids = [one.pid for one in runner.rank_reports()[1:]]
    os.write(1, (" ".join(map(str, pids)) + "\n").encode())
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

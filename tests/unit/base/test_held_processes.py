"""Processes that are killed by whoever holds them, though it has not started them."""

from __future__ import annotations

import os
import signal
import subprocess

from baton.processes.held_processes import HeldProcesses


def test_a_stopped_process_is_killed_and_one_that_has_ended_is_no_error() -> None:
    held = HeldProcesses()
    with subprocess.Popen(["sleep", "1000"]) as stopped, subprocess.Popen(["true"]) as ended:
        stopped.send_signal(signal.SIGSTOP)
        held.hold([stopped.pid, ended.pid])
        ended.wait()
        before = len(os.listdir("/proc/self/fd"))
        held.kill()
        assert stopped.wait() == -signal.SIGKILL
        held.kill()
    held.let_go()
    assert len(os.listdir("/proc/self/fd")) < before
    held.hold([ended.pid])
    held.kill()

"""A process that hangs at its end is ended all the same, and one that does not ends at once."""

from __future__ import annotations

import subprocess
import sys

_HANGS = """
import threading
from baton.processes.ends import end_within

end_within(0.01)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""
_ENDS = "from baton.processes.ends import end_within; end_within(3600.0)"
_LEAVES_CYCLES = """
import sys
from baton.cli.commands.processes import _run_process

class Left:
    def __del__(self):
        sys.stdout.write("looked at")

def run():
    left = Left()
    left.itself = left
    return 0

_run_process("n", run, None, 0, None, None)
"""


def test_a_process_that_hangs_at_its_end_is_ended_and_another_is_not() -> None:
    assert subprocess.run([sys.executable, "-c", _HANGS], timeout=60, check=False).returncode == 1
    assert subprocess.run([sys.executable, "-c", _ENDS], timeout=60, check=False).returncode == 0


def test_the_garbage_collector_does_not_run_at_the_end() -> None:
    """With a model it would take seconds, during which no signal is handled."""
    done = subprocess.run([sys.executable, "-c", _LEAVES_CYCLES], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"")

"""A process that hangs at its end is ended all the same, and one that does not ends by itself."""

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


def test_a_process_that_hangs_at_its_end_is_ended_and_another_is_not() -> None:
    assert subprocess.run([sys.executable, "-c", _HANGS], timeout=60, check=False).returncode == 1
    assert subprocess.run([sys.executable, "-c", _ENDS], timeout=60, check=False).returncode == 0

"""Failpoints: named places in the code where faults can be injected, for drills and tests; no-ops unless switched on.

To inject a fault, put a file into the directory with which the process was started (`baton node --failpoints`). The
file has the failpoint's name and contains the action. An id after it restricts the fault to that request:

    kill                send SIGKILL to the process
    stop REQUEST        send SIGSTOP to the process
    sleep 0.5 REQUEST   let the thread sleep for so many seconds

The first process that reaches the failpoint removes the file, so a fault is injected once, however many nodes reach the
failpoint and however often they are restarted. That process leaves a file NAME.struck with its process id.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

_inject: Callable[[str, str], None] | None = None
"""Called at every failpoint with its name and the request's id; None: failpoints do nothing."""


def failpoint(name: str, request_id: str = "") -> None:
    """Inject the fault that was requested for this failpoint, if any. `request_id`: the request that reached it."""
    if _inject is not None:
        _inject(name, request_id)


def configure_failpoints(directory: Path | None) -> None:
    """Switch failpoints on, with faults requested by files in this directory; None: switch them off."""
    set_injector(None if directory is None else lambda name, request_id: _inject_requested(directory, name, request_id))


def set_injector(inject: Callable[[str, str], None] | None) -> None:
    """Call `inject` at every failpoint, with the failpoint's name and the request's id; None: switch failpoints off."""
    global _inject
    _inject = inject


def _inject_requested(directory: Path, name: str, request_id: str) -> None:
    """Inject the fault that a file in the directory requests for this failpoint, if there is one."""
    try:
        wanted, *words = (directory / name).read_text().split()
        seconds = float(words.pop(0)) if wanted == "sleep" else 0.0
        if words and words != [request_id]:
            return
        taken = directory / f"{name}.{os.getpid()}"
        (directory / name).rename(taken)
    except FileNotFoundError:
        return
    taken.write_text(str(os.getpid()))
    taken.rename(directory / f"{name}.struck")
    if wanted == "sleep":
        time.sleep(seconds)
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[wanted])

"""Named places where a process can be made to fail, for drills and tests; no-ops unless it was told to look for them.

Whoever wants a fault puts a file into the directory that the process was started with (`baton node --failpoints`). The
file's name is the place's; its words are what is to happen and, if one request alone is meant, that request's id:

    kill                as SIGKILL
    stop REQUEST        as SIGSTOP
    sleep 0.5 REQUEST   the thread does nothing for so many seconds

The first process that comes by takes the file away, so a fault strikes once, however many nodes pass the place and
however often they are restarted. It leaves NAME.struck with its process id, which is the proof.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

_strike: Callable[[str, str], None] | None = None


def failpoint(name: str, request_id: str = "") -> None:
    """The place of that name, reached by that request."""
    if _strike is not None:
        _strike(name, request_id)


def look_for_failpoints(directory: Path | None) -> None:
    """From now on, take what is asked for in the directory; None: nothing any more."""
    strike_by(None if directory is None else lambda name, request_id: _look(directory, name, request_id))


def strike_by(strike: Callable[[str, str], None] | None) -> None:
    """Have this called at every place, with its name and the request's id; None: nothing any more."""
    global _strike
    _strike = strike


def _look(directory: Path, name: str, request_id: str) -> None:
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

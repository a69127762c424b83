"""A program for fork servers to start: it tells on a descriptor what it is, and ends with a given code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from baton.processes.fork_server import own_fork_server

VARIABLE = "FORKED_WITNESS"
OTHER_VARIABLE = "FORKED_WITNESS_OTHER"


def main(arguments: Sequence[str]) -> int:
    """`DESCRIPTOR CODE [WORD…]`: tell what this process is, start another with the other words if there are any."""
    descriptor, code, *others = arguments
    own = own_fork_server()
    told = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "directory": os.getcwd(),
        "environment": [os.environ.get(name) for name in (VARIABLE, OTHER_VARIABLE)],
        "command": open("/proc/self/cmdline").read().rstrip("\0").split("\0"),  # noqa: SIM115
        "has_fork_server": own is not None,
    }
    os.write(int(descriptor), json.dumps(told).encode() + b"\n")
    if own is not None and others:
        command = [sys.executable, "-m", __spec__.name, descriptor, "0", *others]
        forked = own.fork(command, {int(descriptor): int(descriptor)}, {})
        return 1 if forked is None or forked.wait(60.0) != 0 else int(code)
    return int(code)

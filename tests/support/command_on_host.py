"""A command of Baton in a network namespace, forked as in `forked_commands`: what `ip netns exec` is for programs."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from baton.processes.fork_server import ForkedProcess
from tests.support.forked_commands import fork_server
from tests.support.forked_commands import main as run_command

_THIS = "tests.support.command_on_host"
_BATON = [sys.executable, "-P", "-m", "baton.cli.main"]
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_MNT_DETACH = 2


def start_on_host(
    namespace: str, words: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a command, given by what follows `baton`. It keeps the process id that the returned process has."""
    server = fork_server()
    if server is None:
        command = ["ip", "netns", "exec", namespace, *_BATON, *words]
        return subprocess.Popen(command, env=dict(environment), stdout=output, stderr=output)
    what = json.dumps({"words": list(words), "environment": dict(environment), "directory": os.getcwd()})
    with open(os.devnull, "rb") as nothing:
        descriptors = {0: nothing.fileno(), 1: output.fileno(), 2: output.fileno()}
        forked = server.fork([sys.executable, "-m", _THIS, namespace, what], descriptors, {})
    assert forked is not None, "the fork server of the tests does not answer"
    return forked


def main(arguments: Sequence[str]) -> int:
    """Enter the namespace, and be the command; returns its exit code."""
    namespace, what = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        _check(libc.setns(file.fileno(), _CLONE_NEWNET))
    # The network devices in /sys are those of the process that has mounted it.
    _check(libc.unshare(_CLONE_NEWNS))
    _check(libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None))
    libc.umount2(b"/sys", _MNT_DETACH)
    _check(libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None))
    return run_command([what])


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

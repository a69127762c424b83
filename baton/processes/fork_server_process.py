"""The process of a fork server: `python -m baton.processes.fork_server_process DESCRIPTOR IMPORTS ROOM`.

Only `ForkServer` starts it. ROOM is a text as long as the longest command line that a forked process shows.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from baton.processes.ends import die_with_parent
from baton.processes.fork_server import LOADED, ForkedProcess, ForkServer, give_fork_server
from baton.processes.process_stat import process_stat

_TITLE = ("baton", "fork-server")
_MAX_REQUEST = 1 << 17
_STANDARD_ERROR = 2
_MAX_DESCRIPTORS = 253
"""So many the kernel sends at a time (unix(7), SCM_RIGHTS)."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A command to run, and the numbers of its descriptors, which are in their places."""

    command: Sequence[str]
    directory: str
    descriptors: Sequence[int]
    environment: Mapping[str, str]
    has_fork_server: bool


def main(arguments: Sequence[str]) -> int:
    """Import, then fork on request until the parent is gone. Returns the exit code: in a forked process that of its
    command.
    """
    channel = socket.socket(fileno=int(arguments[0]))
    show_command(_TITLE)
    importlib.import_module(arguments[1])
    # A collection would write to each object, and so copy pages that forked processes share.
    gc.collect()
    gc.freeze()
    channel.send(LOADED)
    request = _serve(channel, os.getppid())
    while request is not None and request.has_fork_server:
        request = _with_fork_server(request)
    return _run(request) if request is not None else 0


def _serve(channel: socket.socket, parent: int) -> _Request | None:
    """Fork on request. Returns in a forked process, with what it is to run; or without, once the parent is gone."""
    while True:
        text, received, _flags, _address = socket.recv_fds(channel, _MAX_REQUEST, _MAX_DESCRIPTORS)
        if not text:
            return None
        if _fork(parent, lambda pid: channel.send(str(pid).encode())):
            channel.close()
            asked = json.loads(text)
            # Before anything else is opened, which could get one of these numbers.
            _place(dict(zip(asked["descriptors"], received, strict=True)))
            return _Request(**asked)
        for descriptor in received:
            os.close(descriptor)


def _fork(parent: int, tell: Callable[[int], object]) -> bool:
    """Start a process whose parent is this one's, and `tell` its id; returns whether this is the new process.

    It goes on only once its id was told, so none runs of which the parent does not know.
    """
    pid_read, pid_write = os.pipe()
    go_read, go_write = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid != 0:
            os.write(pid_write, str(pid).encode())
            os._exit(0)
        for descriptor in (pid_read, pid_write, go_write):
            os.close(descriptor)
        # The kernel kills this process with its parent, so the parent has to be the right one by now.
        signal_byte = os.read(go_read, 1)
        die_with_parent()
        if not signal_byte or os.getppid() != parent:
            os._exit(1)
        os.close(go_read)
        os.setsid()
        return True
    # If the process between can't fork, the pipe has to end.
    os.close(pid_write)
    pid = int(os.read(pid_read, 20))
    os.waitpid(between, 0)
    tell(pid)
    os.write(go_write, b".")
    for descriptor in (pid_read, go_read, go_write):
        os.close(descriptor)
    return False


def _place(descriptors: Mapping[int, int]) -> None:
    """Give each received descriptor the number that it is to have."""
    # First all go where none of them is to be.
    beyond = max(descriptors, default=0) + 1
    moved = {number: fcntl.fcntl(received, fcntl.F_DUPFD, beyond) for number, received in descriptors.items()}
    for received in descriptors.values():
        os.close(received)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
        os.close(descriptor)


def _with_fork_server(request: _Request) -> _Request | None:
    """Give this process a fork server, and return its request; in that fork server do as `_serve` does."""
    this = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        # Ctrl-C is for the process that this one serves.
        os.setsid()
        ours.close()
        for descriptor in request.descriptors:
            if descriptor > _STANDARD_ERROR:
                os.close(descriptor)
        show_command(_TITLE)
        theirs.send(LOADED)
        return _serve(theirs, this) if os.getppid() == this else None
    theirs.close()
    server = ForkServer(ours, ForkedProcess(pid))
    server.wait_until_loaded()
    give_fork_server(server)
    return replace(request, has_fork_server=False)


def _run(request: _Request) -> int:
    """Run a command in this process, as if it had been started as a program; returns the exit code."""
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    module = request.command.index("-m") + 1
    show_command(request.command)
    return int(importlib.import_module(request.command[module]).main(request.command[module + 1 :]))


def show_command(words: Sequence[str]) -> None:
    """Let `ps` show another command line, cut to the length of the one with which the process was started.

    The kernel reads it from the process's memory, whose addresses /proc/self/stat has (proc(5), arg_start, arg_end).
    """
    start, end = process_stat(os.getpid()).arguments
    text = b"\0".join(map(os.fsencode, words))[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _end(code: int) -> NoReturn:
    """End this process as multiprocessing ends a forked one: without freeing each object, which would first copy the
    pages that it shares with the fork server.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main(sys.argv[1:]))

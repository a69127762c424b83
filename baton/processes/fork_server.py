"""A process that has imported what others need, and forks: a process that it starts is ready seconds earlier.

A forked process is a child of whoever asked for it, as any other process is: the fork server's own child, between them,
ends at once, and who asked adopts what it leaves (PR_SET_CHILD_SUBREAPER). So nothing depends on the fork server once a
process runs. Where it has ended, or does not answer, processes start as programs do.

A fork server is started as a program, which then imports; or a forked process has one of its own from the beginning
(`own_fork_server`), which has imported already.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from baton.processes.ends import die_with_parent

PROCESS = "baton.processes.fork_server_process"
LOADED = b"loaded"
_ANSWER_S = 2.0
"""How long a fork may take, during which its caller does nothing else. It takes milliseconds."""
_PR_SET_CHILD_SUBREAPER = 36


class ForkedProcess:
    """A child process that a fork server has started, used as a `subprocess.Popen` is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        # Whoever waits for a process that another thread has waited for may meet a new one of the same id.
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code of the process, or the negative number of a signal; None while it runs."""
        with self._lock:
            if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0] != 0:
                self.returncode = os.waitstatus_to_exitcode(ended[1])
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; returns what `poll` does. Raises subprocess.TimeoutExpired."""
        with self._lock:
            descriptor = os.pidfd_open(self.pid) if self.returncode is None else None
        if descriptor is not None:
            try:
                end = select.poll()
                end.register(descriptor, select.POLLIN)
                end.poll(None if timeout is None else max(0.0, timeout) * 1000)
            finally:
                os.close(descriptor)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it is known to have ended."""
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A fork server, for the process whose children its processes become."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        """`channel`: the connection to the fork server, which `process` is."""
        self._channel = channel
        self._process = process
        self._owner = os.getpid()
        self._is_usable = False
        self._lock = threading.Lock()

    @staticmethod
    def start(imports: str, environment: Mapping[str, str], longest_title: int, log: Path) -> ForkServer:
        """Start one as a program, which then imports for seconds. Raises OSError.

        `imports`: the module that imports what processes need. `environment`: variables that are set while it does, in
        addition to this process's. `longest_title`: the bytes of the longest command line of a forked process.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", PROCESS, str(theirs.fileno()), imports, "-" * longest_title]
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **environment},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ForkServer(ours, process)

    @property
    def pid(self) -> int:
        """The process id of the fork server."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether everything is imported, and no fork has failed."""
        return self._is_usable

    @property
    def is_owned(self) -> bool:
        """Whether this process is the one whose children its processes become, and not a child of that one."""
        return os.getpid() == self._owner

    async def loaded(self) -> None:
        """Wait until everything is imported, or the process has ended."""
        self._channel.setblocking(False)
        with suppress(OSError):
            self._is_usable = await asyncio.get_running_loop().sock_recv(self._channel, len(LOADED)) == LOADED

    def wait_until_loaded(self) -> None:
        """Wait as `loaded` does, without an event loop."""
        self._channel.settimeout(None)
        with suppress(OSError):
            self._is_usable = self._channel.recv(len(LOADED)) == LOADED

    def fork(
        self,
        command: Sequence[str],
        descriptors: Mapping[int, int],
        environment: Mapping[str, str],
        *,
        has_fork_server: bool = False,
    ) -> ForkedProcess | None:
        """Run `python -m MODULE …` in a new process; returns None if the fork server can't start it.

        `descriptors`: those that the process gets, and which of this process they are copies of. `environment`:
        variables in addition to this process's. `has_fork_server`: whether the process has one of its own.
        """
        if not self._is_usable or not self.is_owned:
            return None
        try:
            directory = os.getcwd()
        except FileNotFoundError:  # it was removed, and no process can go there any more
            return None
        request = {
            "command": list(command),
            "directory": directory,
            "descriptors": list(descriptors),
            "environment": {**os.environ, **environment},
            "has_fork_server": has_fork_server,
        }
        with self._lock, _adopting():
            self._channel.settimeout(_ANSWER_S)
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], list(descriptors.values()))
                if answer := self._channel.recv(64):
                    return ForkedProcess(int(answer))
            except OSError:
                pass
        # What it may have forked does not go on without its word.
        self.close()
        return None

    def close(self) -> None:
        """End the fork server, but none of the processes that it has started; idempotent."""
        self._is_usable = False
        self._channel.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


_own: ForkServer | None = None


def own_fork_server() -> ForkServer | None:
    """The fork server of this process, if it was given one. A child of this process has none."""
    return _own if _own is not None and _own.is_owned else None


def give_fork_server(server: ForkServer | None) -> None:
    """Let `own_fork_server` return this one."""
    global _own
    _own = server


def start_process(
    command: Sequence[str], descriptors: Sequence[int], *, starts_others: bool = False
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start `python -m MODULE …` with these descriptors, forked by this process's fork server if it has one.

    `starts_others`: whether the process starts others itself, so that it needs a fork server, too. Raises OSError.
    """
    server = own_fork_server()
    forked = None
    if server is not None:
        copies = {fd: fd for fd in (1, 2, *descriptors)}
        forked = server.fork(command, copies, {}, has_fork_server=starts_others)
    return forked or subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL)


@contextmanager
def _adopting() -> Iterator[None]:
    """Meanwhile a process whose parent has ended becomes a child of this one, if it was started by it or its children.

    prctl fails only for numbers that the kernel does not know. Then what is forked sees that its parent is another.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)

"""A process that has imported what nodes need, and forks: a node that it starts is ready seconds earlier.

A forked node is a child of the supervisor as any other process is: the fork server's own child, between them, ends at
once, and the supervisor adopts what it leaves (PR_SET_CHILD_SUBREAPER). So nothing depends on the fork server once a
node runs. Where it has ended, or does not answer, nodes start as programs do.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from baton.cli.cluster.supervisor.parent import die_with_parent

PROCESS = "baton.cli.cluster.supervisor.fork_server_process"
LOADED = b"loaded"
_ANSWER_S = 2.0
"""How long a fork may take, during which the supervisor does nothing else. It takes milliseconds."""
_PR_SET_CHILD_SUBREAPER = 36


class ForkedProcess:
    """A process that the fork server has started, used as a `subprocess.Popen` is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait for the end of the process; returns its exit code, or the negative number of a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal. The process must not have been waited for."""
        os.kill(self.pid, number)


class ForkServer:
    """The supervisor's side. Belongs to the event loop of whoever starts it."""

    def __init__(self, environment: Mapping[str, str], longest_title: int, log: Path) -> None:
        """Start the process, which then imports for seconds. Raises OSError.

        `environment`: variables of all processes to be forked, in addition to this one's. `longest_title`: the bytes of
        their longest command line.
        """
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_usable = False
        command = [sys.executable, "-P", "-m", PROCESS, str(theirs.fileno()), "-" * longest_title]
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
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
            self._channel.close()
            raise
        finally:
            theirs.close()
        self._channel.setblocking(False)
        # From now on a process whose parent has ended becomes a child of this one.
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
            self.close()
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")

    @property
    def pid(self) -> int:
        """The process id of the fork server."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    async def loaded(self) -> None:
        """Wait until everything is imported, or the process has ended."""
        with suppress(OSError):
            self._is_usable = await asyncio.get_running_loop().sock_recv(self._channel, 64) == LOADED

    def fork(self, command: Sequence[str], output: int, notify: int, parent: int) -> ForkedProcess | None:
        """Start a planned command, and wait for its process id; returns None if the fork server can't start it.

        `output` becomes the standard output and error. `notify` and `parent` are the descriptors of `--notify-fd` and
        `--parent-fd`.
        """
        if not self._is_usable:
            return None
        self._channel.settimeout(_ANSWER_S)
        try:
            socket.send_fds(self._channel, [json.dumps(list(command)).encode()], [output, notify, parent])
            if answer := self._channel.recv(64):
                return ForkedProcess(int(answer))
        except OSError:
            pass
        # What it may have forked does not go on without its word.
        self._is_usable = False
        with suppress(ProcessLookupError):
            self._process.kill()
        return None

    def close(self) -> None:
        """End the process."""
        self._is_usable = False
        self._channel.close()
        self._process.kill()
        self._process.wait()


def reap_adopted(known: Callable[[int], bool]) -> None:
    """Wait for children that have ended and nobody else waits for: those whose own parents, nodes say, were killed.

    `known`: whether somebody waits for a process. Whoever does calls this again afterwards.
    """
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and not known(ended.si_pid):
            os.waitpid(ended.si_pid, 0)

"""One process of a cluster under its supervisor, and when it is started again."""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.cli.cluster.supervisor.plan import ChildSpec, flags_of_descriptors
from baton.machine import Machine
from baton.observe.ready import AnnouncementReader, Failed, Ready
from baton.processes.death_pipe import DeathPipe
from baton.processes.ends import die_with_parent
from baton.processes.fork_server import ForkedProcess, ForkServer
from baton.registry.embedded import READY_WORDS

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 30.0
STABLE_S = 10.0
"""A process that was ready for this long did not die of its start, so deaths before it no longer count."""
LOOP_AFTER = 3
"""This many deaths in a row are a crash loop."""


class ChildState(enum.Enum):
    """The states of a supervised process."""

    STARTING = enum.auto()
    READY = enum.auto()
    WAITING = enum.auto()
    STOPPING = enum.auto()
    STOPPED = enum.auto()


class ChildEvent(enum.Enum):
    """The events of a supervised process."""

    BECAME_READY = enum.auto()
    EXITED = enum.auto()
    RETRY = enum.auto()
    STOP = enum.auto()


CHILD_TABLE = {
    (ChildState.STARTING, ChildEvent.BECAME_READY): ChildState.READY,
    (ChildState.STARTING, ChildEvent.EXITED): ChildState.WAITING,
    (ChildState.STARTING, ChildEvent.STOP): ChildState.STOPPING,
    (ChildState.READY, ChildEvent.EXITED): ChildState.WAITING,
    (ChildState.READY, ChildEvent.STOP): ChildState.STOPPING,
    (ChildState.WAITING, ChildEvent.RETRY): ChildState.STARTING,
    (ChildState.WAITING, ChildEvent.STOP): ChildState.STOPPED,
    (ChildState.STOPPING, ChildEvent.BECAME_READY): ChildState.STOPPING,
    (ChildState.STOPPING, ChildEvent.STOP): ChildState.STOPPING,
    (ChildState.STOPPING, ChildEvent.EXITED): ChildState.STOPPED,
    (ChildState.STOPPED, ChildEvent.STOP): ChildState.STOPPED,
}


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the process now."""


@dataclass(frozen=True, slots=True)
class RetryIn:
    """Wait for `seconds`, then call `ChildLife.retry`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the process to end."""


Effect = Spawn | RetryIn | Terminate | None


class ChildLife:
    """The state of one supervised process over all of its runs, and when one that died is started again. Does no I/O.

    The delay before a start grows exponentially with the deaths in a row. A process that served for a while begins
    again with the first delay. One that dies again and again is in a crash loop: it is shown as such, and still started
    again after the longest delay.
    """

    def __init__(self, name: str) -> None:
        self._machine = Machine(name, ChildState.STARTING, CHILD_TABLE)
        self._ready_at: float | None = None
        self._deaths_in_a_row = 0
        self._restarts = 0

    @property
    def state(self) -> ChildState:
        return self._machine.state

    @property
    def restarts(self) -> int:
        """How often the process was started again."""
        return self._restarts

    @property
    def status(self) -> str:
        """The state as operators see it."""
        state = self.state
        if state is ChildState.READY:
            return "Ready"
        if state is ChildState.STOPPING:
            return "Draining"
        if state is ChildState.STOPPED:
            return "Stopped"
        return "CrashLoop" if self._deaths_in_a_row >= LOOP_AFTER else "Starting"

    def became_ready(self, now: float) -> Effect:
        """The process has announced that it is ready; `now` is monotonic seconds."""
        if self._machine.feed(ChildEvent.BECAME_READY) is ChildState.READY:
            self._ready_at = now
        return None

    def exited(self, now: float) -> Effect:
        """The process has ended; `now` is monotonic seconds."""
        if self._machine.feed(ChildEvent.EXITED) is not ChildState.WAITING:
            return None
        if self._ready_at is not None and now - self._ready_at >= STABLE_S:
            self._deaths_in_a_row = 0
        self._ready_at = None
        self._deaths_in_a_row += 1
        return RetryIn(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self._deaths_in_a_row - 1, 32)))

    def retry(self) -> Effect:
        """The delay before the next start has passed."""
        self._machine.feed(ChildEvent.RETRY)
        self._restarts += 1
        return Spawn()

    def stop(self) -> Effect:
        """End the process for good. Idempotent."""
        return Terminate() if self._machine.feed(ChildEvent.STOP) is ChildState.STOPPING else None


class ChildRun:
    """One run of a process. It belongs to the event loop that started it, on which its callbacks run.

    The process has a session of its own, so that Ctrl-C reaches only the supervisor, which then drains the processes in
    order. It ends with the supervisor even if that is killed: Baton's own processes watch a pipe whose other end only
    the supervisor holds, and on Linux the kernel kills a dead parent's children (PR_SET_PDEATHSIG), Redis included.
    """

    def __init__(
        self, on_announcement: Callable[[Ready | Failed], None], on_exit: Callable[[int], None], death_pipe: DeathPipe
    ) -> None:
        self._on_announcement = on_announcement
        self._on_exit = on_exit
        self._death_pipe = death_pipe
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._read_announcements: Callable[[], None] = _do_nothing

    @property
    def pid(self) -> int:
        """The process id; 0 after the end of the process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    def start(self, spec: ChildSpec, command: Sequence[str], log: Path, fork_server: ForkServer | None = None) -> None:
        """Start the process: by the fork server if it can, and else as a program. Raises OSError if there is none."""
        read_end, write_end = os.pipe()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            passed = [write_end, self._death_pipe.read_end] if spec.announces else []
            words = [*command, *flags_of_descriptors(*passed)] if passed else command
            if fork_server is not None:
                descriptors = {1: output, 2: output} | {word: word for word in passed}
                self._process = fork_server.fork(words, descriptors, spec.environment, has_fork_server=spec.has_ranks)
            if self._process is None:
                self._process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=output if spec.announces else write_end,
                    stderr=output,
                    env={**os.environ, **spec.environment},
                    pass_fds=passed,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
        except OSError:
            os.close(read_end)
            os.close(output)
            raise
        finally:
            os.close(write_end)
        self._listen(read_end, output, None if spec.announces else _RedisOutput())
        self._watch(self._process)

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process still runs."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _listen(self, pipe: int, output: int, redis: _RedisOutput | None) -> None:
        reader = AnnouncementReader()
        os.set_blocking(pipe, False)

        def readable() -> None:
            with suppress(BlockingIOError):
                while piece := os.read(pipe, 65536):
                    if redis is not None:
                        # On a full disk lines of the log are lost, but Redis goes on.
                        with suppress(OSError):
                            os.write(output, piece)
                        if redis.says_ready(piece):
                            self._on_announcement(Ready("", ""))
                        continue
                    for announcement in reader.feed(piece):
                        self._on_announcement(announcement)
                self._loop.remove_reader(pipe)
                os.close(pipe)
                os.close(output)
                self._read_announcements = _do_nothing

        self._read_announcements = readable
        self._loop.add_reader(pipe, readable)

    def _watch(self, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        def ended() -> None:
            code = process.wait()
            # The last announcement, which says why the process ended, may not have been read yet.
            self._read_announcements()
            self._on_exit(code)

        try:
            descriptor = os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            threading.Thread(
                target=lambda: (process.wait(), self._loop.call_soon_threadsafe(ended)), daemon=True
            ).start()
            return

        def signalled() -> None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            ended()

        self._loop.add_reader(descriptor, signalled)


class _RedisOutput:
    """Finds in the output of Redis, which has no descriptor for announcements, that it is ready."""

    def __init__(self) -> None:
        self._seen = b""
        self._is_ready = False

    def says_ready(self, piece: bytes) -> bool:
        """Whether this piece of output is the first after which Redis is known to be ready."""
        if self._is_ready:
            return False
        self._seen = (self._seen + piece.lower())[-4096:]
        self._is_ready = READY_WORDS in self._seen
        return self._is_ready


def _do_nothing() -> None:
    pass

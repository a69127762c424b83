"""Child processes that do untrusted work within limits of memory and time.

The work is compiling what an output must be (`schema_compiling`), and rendering a chat template that came with a
request or with a model (`model_template`). A stranger's constraint or template may take any time
and any memory.

The rules:

1. A child that exceeds a limit ends and is replaced when the next work comes; the reason names the limit.
2. Children end with this process, however it ends, and use no CPU time while there is nothing to do.
3. Once a child is ready it can open no file and start no process, and it knows no secret of its parent.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from baton.errors import Overloaded
from baton.messages.sampling import ConstraintKind
from baton.processes.bounded_process import child_environment
from baton.text.bounded_child import Outcome, out_of_memory, parse_answer, receive, send

Job = ConstraintKind | Literal["chat_template", "template_traits"]
"""What a child does: compile a constraint of this kind, render a chat template, or find what one has a place for."""
BOUNDED_CHILD = "baton.text.bounded_child"
"""The module that children run."""
_START_S = 30.0
"""Seconds within which a child must start. It needs 0.3 s, or more on a machine whose cores are all busy."""


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """Limits of one piece of work. Schemas and templates that people write take 0.25 s of CPU and 10 MB at most."""

    cpu_s: float = 1.0
    wall_s: float = 3.0
    """Limit of elapsed time, for a child that gets little CPU time: `cpu_s` at a third of a core."""
    memory_bytes: int = 64 << 20


class Workers(Protocol):
    """What does untrusted work; `BoundedWorkers` does it in child processes."""

    def run(self, job: Job, content: str) -> Outcome:
        """Do one piece of work. Raises Overloaded if it can't be done now."""
        ...

    def close(self) -> None:
        """Do no more work. Idempotent."""
        ...


class BoundedWorkers:
    """A pool of child processes. Its methods may be called from any thread; `run` blocks the calling thread.

    There are as many children as threads call `run` at the same time. They are started on demand, and kept.
    """

    def __init__(self, limits: WorkLimits | None = None) -> None:
        self._limits = limits or WorkLimits()
        self._lock = threading.Lock()
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []
        self._is_closed = False

    @property
    def pids(self) -> set[int]:
        """The process ids of the children that run."""
        with self._lock:
            return {child.pid for child in self._children}

    def run(self, job: Job, content: str) -> Outcome:
        """Have a child do one piece of work. Raises Overloaded if no child can be started."""
        child = self._take()
        try:
            outcome = child.run(job, content, self._limits)
        except BaseException:
            self._drop(child)
            raise
        self._put_back(child)
        return outcome

    def close(self) -> None:
        """End all children, even while they work. Idempotent."""
        with self._lock:
            self._is_closed = True
            children, self._children = self._children, set()
            self._idle.clear()
        for child in children:
            child.close()

    def _take(self) -> _Child:
        with self._lock:
            if self._is_closed:
                raise Overloaded("this process is shutting down")
            if self._idle:
                return self._idle.pop()
        try:
            child = _Child(self._limits)
        except OSError as error:
            raise Overloaded(f"no process for untrusted work can be started: {error}") from error
        with self._lock:
            if not self._is_closed:
                self._children.add(child)
                return child
        child.close()
        raise Overloaded("this process is shutting down")

    def _put_back(self, child: _Child) -> None:
        with self._lock:
            if child.is_alive and not self._is_closed:
                self._idle.append(child)
                return
        self._drop(child)

    def _drop(self, child: _Child) -> None:
        with self._lock:
            self._children.discard(child)
        child.close()


class _Child:
    """One process, and the socket to it. Belongs to one thread at a time."""

    def __init__(self, limits: WorkLimits) -> None:
        """Start a child and wait until it is ready; raises OSError when it can't be started."""
        self.is_alive = True
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        BOUNDED_CHILD,
                        str(os.getpid()),
                        str(limits.cpu_s),
                        str(limits.memory_bytes),
                    ],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=child_environment(),
                    cwd="/",
                )
        except BaseException:
            self._socket.close()
            raise
        self.pid = self._process.pid
        try:
            self._socket.settimeout(_START_S)
            if receive(self._socket) is None:
                raise OSError(f"the child process ended at its start, with exit status {self._process.wait()}")
        except BaseException:
            self.close()
            raise

    def run(self, job: Job, content: str, limits: WorkLimits) -> Outcome:
        """Do one piece of work in this child, which may end by that. Raises Overloaded if it is closed meanwhile."""
        try:
            self._socket.settimeout(limits.wall_s)
            send(self._socket, f"{job} {content}")
            answer = receive(self._socket)
            if answer is not None:
                outcome = parse_answer(answer)
                if outcome.exceeds_limits:
                    # What the work has left in memory would be missing for the next one.
                    self.close()
                return outcome
        except TimeoutError:
            self.close()
            reason = f"was not processed within {limits.wall_s:g} s: make it simpler, or send it again"
            return Outcome(reason=reason, is_lasting=False)
        except ValueError:
            # What came is no message. Only a child that a template has taken over can send that.
            self._process.kill()
        except OSError:
            pass
        return self._outcome_of_end(limits)

    def close(self) -> None:
        """Kill the child, if it runs. Idempotent."""
        self.is_alive = False
        # Wakes a thread that waits for the child's answer. Closing alone would not.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _outcome_of_end(self, limits: WorkLimits) -> Outcome:
        was_closed = not self.is_alive
        code = self._process.wait() if not was_closed else 0
        self.close()
        if was_closed:
            raise Overloaded("this process is shutting down")
        if code == -signal.SIGPROF:
            reason = f"takes more than {limits.cpu_s:g} s of CPU time: make it simpler"
            return Outcome(reason=reason, exceeds_limits=True)
        if code == -signal.SIGABRT:
            return Outcome(reason=out_of_memory(limits.memory_bytes), exceeds_limits=True)
        if code == -signal.SIGSEGV:
            # A stack overflow.
            return Outcome(reason="is nested too deeply: make it simpler", exceeds_limits=True)
        # A signal from elsewhere, which says nothing about the work.
        return Outcome(reason=f"can't be processed: the process for it ended with {code}", is_lasting=False)

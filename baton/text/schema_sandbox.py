"""Compiles untrusted constraints of an output in child processes, within limits of memory and time.

Below, "schema" stands for all of them: JSON schemas, regular expressions, choices and grammars.

The rules:

1. A schema is compiled in this process only after a child has compiled it (`check`), within `CompileLimits`.
2. A child that exceeds a limit ends and is replaced at the next check; the schema is refused with an InvalidRequest
   that names the limit.
3. The verdict on a schema is cached by the schema's digest, so that checking it again costs nothing.
4. A refusal that may be caused by this machine and not by the schema (the wall clock limit) is not cached.
5. Children end with this process, however it ends, and use no CPU time while there is nothing to compile.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass

from cachetools import LRUCache

from baton.errors import InvalidRequest, Overloaded
from baton.messages.sampling import ConstraintKind
from baton.text.schema_child import out_of_memory, receive, send
from baton.text.schema_compiling import MAX_CHOICE_JSON_BYTES, MAX_SCHEMA_BYTES

_START_S = 30.0
"""Seconds within which a child must start. It needs 0.25 s, or more on a machine whose cores are all busy."""
_MAX_VERDICTS = 1024
SCHEMA_CHILD = "baton.text.schema_child"
"""The module that children run."""
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables that children inherit. The others may hold secrets, and compiling needs none of them."""


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits of compiling one schema. Schemas that people write take 0.25 s of CPU and 10 MB at most."""

    cpu_s: float = 1.0
    wall_s: float = 3.0
    """Limit of elapsed time, for a child that gets little CPU time: `cpu_s` at a third of a core."""
    memory_bytes: int = 64 << 20


class SchemaSandbox:
    """Checks schemas in child processes. Its methods may be called from any thread; `check` blocks the calling thread.

    There are as many children as threads call `check` at the same time. They are started on demand, and kept.
    """

    def __init__(self, limits: CompileLimits | None = None) -> None:
        self._limits = limits or CompileLimits()
        self._lock = threading.Lock()
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []
        self._verdicts: LRUCache[bytes, str] = LRUCache(_MAX_VERDICTS)
        """By a schema's digest: why it can't be served, or an empty text."""
        self._is_closed = False

    @property
    def pids(self) -> set[int]:
        """The process ids of the children that run."""
        with self._lock:
            return {child.pid for child in self._children}

    def check_known(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """Whether the cache says that a schema can be served; raises InvalidRequest if it says that it can't."""
        digest = _digest(text, kind)
        with self._lock:
            reason = self._verdicts.get(digest)
        if reason:
            raise InvalidRequest(kind, reason)
        return reason is not None

    def check(self, text: str, kind: ConstraintKind = "json_schema") -> None:
        """Check a schema: raises InvalidRequest if it can't be served, and Overloaded if no child can be started."""
        if self.check_known(text, kind):
            return
        child = self._take()
        try:
            verdict = child.check(f"{kind} {text}", self._limits)
        except BaseException:
            self._drop(child)
            raise
        self._put_back(child)
        if verdict.is_lasting:
            digest = _digest(text, kind)
            with self._lock:
                self._verdicts[digest] = verdict.reason
        if verdict.reason:
            raise InvalidRequest(kind, verdict.reason)

    def close(self) -> None:
        """End all children, even while they compile. Idempotent."""
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
            raise Overloaded(f"no process to compile a JSON schema in can be started: {error}") from error
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


@dataclass(frozen=True, slots=True)
class _Verdict:
    reason: str
    """Empty for a schema that can be served."""
    is_lasting: bool = True
    """Whether another check would give the same verdict, so that it may be cached."""


class _Child:
    """One process, and the socket to it. Belongs to one thread at a time."""

    def __init__(self, limits: CompileLimits) -> None:
        """Start a child and wait until it is ready; raises OSError when it can't be started."""
        self.is_alive = True
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", SCHEMA_CHILD, str(os.getpid()), str(limits.cpu_s), str(limits.memory_bytes)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
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

    def check(self, message: str, limits: CompileLimits) -> _Verdict:
        """Compile a schema in this child, which may end by that. Raises Overloaded if it is closed meanwhile."""
        try:
            self._socket.settimeout(limits.wall_s)
            send(self._socket, message)
            reason = receive(self._socket)
        except TimeoutError:
            self.close()
            reason = f"was not compiled within {limits.wall_s:g} s: simplify its patterns, or send it again"
            return _Verdict(reason, is_lasting=False)
        except OSError:
            reason = None
        if reason is not None:
            return _Verdict(reason)
        return self._verdict_of_end(limits)

    def close(self) -> None:
        """Kill the child, if it runs. Idempotent."""
        self.is_alive = False
        # Wakes a thread that waits for the child's answer. Closing alone would not.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _verdict_of_end(self, limits: CompileLimits) -> _Verdict:
        was_closed = not self.is_alive
        code = self._process.wait() if not was_closed else 0
        self.close()
        if was_closed:
            raise Overloaded("this process is shutting down")
        if code == -signal.SIGPROF:
            return _Verdict(f"takes more than {limits.cpu_s:g} s to compile: join fewer patterns")
        if code == -signal.SIGABRT:
            return _Verdict(out_of_memory(limits.memory_bytes))
        # A stack overflow (SIGSEGV), or a signal from elsewhere, which says nothing about the schema.
        return _Verdict(f"can't be compiled: the compiler ended with {code}", is_lasting=code == -signal.SIGSEGV)


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def _digest(text: str, kind: ConstraintKind) -> bytes:
    """The digest under which a schema's verdict is cached.

    Raises InvalidRequest for a schema that is too long or is not valid UTF-8.
    """
    try:
        content = text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(kind, "is not valid UTF-8") from None
    most = MAX_CHOICE_JSON_BYTES if kind == "choice" else MAX_SCHEMA_BYTES
    if len(content) > most:
        raise InvalidRequest(kind, f"has {len(content)} bytes; at most {most} are taken")
    return hashlib.sha256(kind.encode() + content).digest()

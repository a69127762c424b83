"""Compiles JSON schemas of strangers: in processes of their own, within bounds of memory and time.

The rules:

1. A schema is compiled in this process only after a child has compiled it (`check`), within `CompileLimits`.
2. A child that reaches a limit is dead and is replaced by the next check; the schema is refused with an InvalidRequest
   that names the limit.
3. What is known of a schema, good or bad, is remembered by its digest, so that sending it again costs nothing.
4. A refusal that may be this machine's fault and not the schema's (the wall clock's) is not remembered.
5. Children end with this process, however it ends, and use no core while there is nothing to compile.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

from baton.errors import InvalidRequest, Overloaded
from baton.text.schema_child import out_of_memory, receive, send
from baton.text.schema_compiling import FIELD, MAX_SCHEMA_BYTES

_START_S = 30.0
"""A child imports its library within a quarter of a second; more is a machine with no core for it."""
_MAX_VERDICTS = 1024
SCHEMA_CHILD = "baton.text.schema_child"
"""The module that children run."""
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""The rest may hold secrets, and no schema needs them."""


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits of compiling one schema. Schemas that people write take 0.25 s of CPU and 10 MB at most."""

    cpu_s: float = 1.0
    wall_s: float = 3.0
    """For a child that gets no core, as long as it would need at a third of one."""
    memory_bytes: int = 64 << 20


class SchemaSandbox:
    """Checks schemas in children. Its methods may be called from any thread; `check` waits, so call it in one.

    There are as many children as threads are in `check` at once. They are started when they are needed, and kept.
    """

    def __init__(self, limits: CompileLimits | None = None) -> None:
        self._limits = limits or CompileLimits()
        self._lock = threading.Lock()
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        """Why a schema of this digest can't be served, or an empty text; the last asked for last."""
        self._is_closed = False

    @property
    def pids(self) -> set[int]:
        """The process ids of the children that run."""
        with self._lock:
            return {child.pid for child in self._children}

    def check_known(self, json_schema: str) -> bool:
        """Whether it is known that a schema can be served, at once; raises InvalidRequest if it is known not to be."""
        digest = _digest(json_schema)
        with self._lock:
            reason = self._verdicts.get(digest)
            if reason is not None:
                self._verdicts.move_to_end(digest)
        if reason:
            raise InvalidRequest(FIELD, reason)
        return reason is not None

    def check(self, json_schema: str) -> None:
        """Raises InvalidRequest for a schema that can't be served, and Overloaded where no child can be started."""
        if self.check_known(json_schema):
            return
        child = self._take()
        try:
            verdict = child.check(json_schema, self._limits)
        except BaseException:
            self._drop(child)
            raise
        self._put_back(child)
        if verdict.is_lasting:
            self._remember(_digest(json_schema), verdict.reason)
        if verdict.reason:
            raise InvalidRequest(FIELD, verdict.reason)

    def close(self) -> None:
        """End the children, also those that compile. Idempotent."""
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

    def _remember(self, digest: bytes, reason: str) -> None:
        with self._lock:
            self._verdicts[digest] = reason
            self._verdicts.move_to_end(digest)
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Verdict:
    reason: str
    """Empty for a schema that can be served."""
    is_lasting: bool = True
    """The verdict would be the same another time."""


class _Child:
    """One process, and the socket to it. Belongs to one thread at a time."""

    def __init__(self, limits: CompileLimits) -> None:
        """Returns once it is ready; raises OSError when it can't be."""
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
                raise OSError(f"it ended at once, with {self._process.wait()}")
        except BaseException:
            self.close()
            raise

    def check(self, json_schema: str, limits: CompileLimits) -> _Verdict:
        """What came of it. The child may be dead afterwards. Raises Overloaded when it was closed meanwhile."""
        try:
            self._socket.settimeout(limits.wall_s)
            send(self._socket, json_schema)
            reason = receive(self._socket)
        except TimeoutError:
            self.close()
            story = f"was not compiled within {limits.wall_s:g} s: simplify its patterns, or ask again"
            return _Verdict(story, is_lasting=False)
        except OSError:
            reason = None
        if reason is not None:
            return _Verdict(reason)
        return self._verdict_of_end(limits)

    def close(self) -> None:
        """Kill it, if it runs. Idempotent."""
        self.is_alive = False
        # A thread that waits for it wakes up; its descriptor is freed when that thread lets go of it.
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
        # A stack that ran over, or somebody else's signal.
        return _Verdict(f"can't be compiled: the compiler ended with {code}", is_lasting=code == -signal.SIGSEGV)


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def _digest(json_schema: str) -> bytes:
    """Raises InvalidRequest for what is too long to look at, or no text."""
    try:
        content = json_schema.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(FIELD, "is not valid UTF-8") from None
    if len(content) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(FIELD, f"has {len(content)} bytes; at most {MAX_SCHEMA_BYTES} are taken")
    return hashlib.sha256(content).digest()

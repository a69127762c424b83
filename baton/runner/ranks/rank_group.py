"""The processes of the ranks behind the first one of a stage: started, watched and ended by the first one's process.

A rank that ends, or sends no heartbeat for a while, can't be replaced: its part of the KV cache is lost with it.
Then the group is lost: all waiting ends with RankLost, the other processes are killed, and whoever asked is told. A
rank's process ends by itself when the first rank's process does, in whatever way.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from baton.processes.ends import how_it_ended
from baton.processes.fork_server import ForkedProcess, start_process
from baton.runner.adapters.commands import AdapterAnswer, AdapterCommand, AdapterPart, OpenQuestions
from baton.runner.backends.ranks.host_ranks import SharedFiles
from baton.runner.ranks.heartbeats import ANSWER, INTERVAL_S, LOADED, LOADING
from baton.runner.stage_spec import StageSpec

RANK_PROGRAM = "baton.runner.ranks.rank_process"
_MISSED_HEARTBEATS = 10
"""A rank is lost after so many intervals without a heartbeat. They are counted and not timed, since this process may
have been stopped itself."""
_LOADING_HEARTBEATS = 240
"""How many intervals a rank may be silent while its process starts and loads: its interpreter may be busy."""
_END_S = 10.0
_MAX_WORDS = 4096
_MOST_SAID = 1 << 16
"""Answers of a rank are short, as its last words are."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Process:
    rank: int
    """Its number among the ranks of all stages."""
    process: subprocess.Popen[bytes] | ForkedProcess
    channel: socket.socket
    sending: threading.Lock = field(default_factory=threading.Lock)
    heartbeats_left: int = _LOADING_HEARTBEATS
    """How many more intervals it may be silent."""
    said: bytearray = field(default_factory=bytearray)
    """What it has said apart from heartbeats and whole answers: the beginning of an answer, or its last words."""

    @property
    def name(self) -> str:
        return f"rank {self.rank}"

    def send_line(self, text: bytes) -> None:
        with self.sending:
            self.channel.sendall(text + b"\n")

    def take(self, said: bytes) -> list[bytes]:
        """Take what the process has sent; returns the answers that are whole now."""
        if LOADED in said:
            self.heartbeats_left = _MISSED_HEARTBEATS
        elif LOADING in said:
            self.heartbeats_left = _LOADING_HEARTBEATS
        self.said += said.replace(LOADING, b"").replace(LOADED, b"")
        answers = []
        while self.said.startswith(ANSWER) and (end := self.said.find(b"\n")) >= 0:
            answers.append(bytes(self.said[1:end]))
            del self.said[: end + 1]
        del self.said[_MOST_SAID:]
        return answers


class RankGroup:
    """The ranks of a stage behind the first one. It ends them when it is closed or no longer referenced."""

    def __init__(self, spec: StageSpec, files: SharedFiles, abort: Callable[[], None]) -> None:
        """Start the processes; `abort` makes all ranks that wait for others end."""
        self._watch = _Watch(abort)
        self._finalizer = weakref.finalize(self, self._watch.close)
        try:
            for rank in range(1, spec.tensor_parallel):
                self._watch.processes.append(_start(spec, rank, files))
        except BaseException:
            self.close()
            raise
        self._watch.start()

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks behind the first one, in order."""
        return [one.process.pid for one in self._watch.processes]

    @property
    def why_lost(self) -> str:
        """Why the group is lost; empty while it is not."""
        return self._watch.why_lost

    @property
    def adapter_parts(self) -> Sequence[AdapterPart]:
        return [_RankWithAdapters(one, self._watch.questions) for one in self._watch.processes]

    def declare_lost(self, reason: str) -> None:
        """Declare the group lost, because its ranks can't compute together any more. Only the first reason counts."""
        self._watch.declare_lost(reason)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason once the group is lost, from a thread of its own, or now if it is lost."""
        self._watch.tell(callback)

    def close(self) -> None:
        """End the processes and wait for them; idempotent."""
        self._finalizer()


@dataclass(frozen=True, slots=True)
class _RankWithAdapters:
    _process: _Process
    _questions: OpenQuestions

    @property
    def name(self) -> str:
        return self._process.name

    def ask(self, command: AdapterCommand) -> Future[AdapterAnswer]:
        return self._questions.ask(command, self._process.send_line)


class _Watch:
    """Watches the processes in a thread. It does not know the group, which may be forgotten meanwhile."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self.processes: list[_Process] = []
        self.why_lost = ""
        self.questions = OpenQuestions()
        self._abort = abort
        self._lock = threading.Lock()
        self._callback: Callable[[str], None] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="baton-ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, callback: Callable[[str], None]) -> None:
        with self._lock:
            self._callback = callback
            lost = self.why_lost
        if lost:
            callback(lost)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._abort()
        self.questions.fail(self.why_lost or "the ranks were ended")
        for one in self.processes:
            with contextlib.suppress(OSError):  # the other end is gone already
                one.channel.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _END_S
        for one in self.processes:
            try:
                one.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        for one in self.processes:
            one.channel.close()

    def declare_lost(self, reason: str) -> None:
        with self._lock:
            if self._closing or self.why_lost:
                return
            self.why_lost, callback = reason, self._callback
        _log.error("%s: the ranks of this model are lost", reason)
        self._abort()
        self.questions.fail(reason)
        for one in self.processes:
            one.process.kill()
        if callback is not None:
            callback(reason)

    def _run(self) -> None:
        self.declare_lost(self._wait_for_loss())

    def _wait_for_loss(self) -> str:
        """Wait until a rank is lost; returns why. The result means nothing while the group is being closed."""
        with selectors.DefaultSelector() as selector:
            for one in self.processes:
                selector.register(one.channel, selectors.EVENT_READ, one)
            counted = time.monotonic()
            while True:
                for key, _ in selector.select(INTERVAL_S):
                    one = key.data
                    said = _receive(one.channel)
                    if not said:
                        return _end_of(one)
                    for answer in one.take(said):
                        self.questions.answer(answer)
                if time.monotonic() - counted < INTERVAL_S:
                    continue
                counted = time.monotonic()
                for one in self.processes:
                    one.heartbeats_left -= 1
                    if one.heartbeats_left < 0:
                        return f"rank {one.rank} (process {one.process.pid}) sends no heartbeats"


def _receive(channel: socket.socket) -> bytes:
    try:
        return channel.recv(_MAX_WORDS)
    except OSError:
        return b""


def _end_of(one: _Process) -> str:
    name = f"rank {one.rank} (process {one.process.pid})"
    try:
        code = one.process.wait(1.0)
    except subprocess.TimeoutExpired:
        return f"{name} has closed its connection"
    words = one.said[:_MAX_WORDS].decode(errors="replace").strip() if code >= 0 else ""
    return f"{name} {how_it_ended(code)}" + (f": {words}" if words else "")


def _start(spec: StageSpec, rank: int, files: SharedFiles) -> _Process:
    ours, theirs = socket.socketpair()
    try:
        descriptors = ",".join(map(str, files.descriptors))
        words = [str(rank), descriptors, str(theirs.fileno()), spec.to_json()]
        process = start_process([sys.executable, "-m", RANK_PROGRAM, *words], [*files.descriptors, theirs.fileno()])
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return _Process(spec.number_of(rank), process, ours)

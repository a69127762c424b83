"""The connections between the leading stage and another one, and the frames on them: two connections carry frames, each
one way.

A frame is a kind (1 byte), a length (8 bytes, little-endian) and so many bytes. Whoever sends also sends a heartbeat
when there was nothing else for a while, so that an end that has vanished is noticed.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from baton.runner.backends.cpu.kernels.errors import RankLost

INTERVAL_S = 0.5
"""Seconds without a frame after which a heartbeat is sent."""
MISSED_HEARTBEATS = 10
"""So many intervals without a byte from a stage that computes mean that it is lost. They are counted and not timed,
since this process may have been stopped itself."""
IDLE_HEARTBEATS = 60
"""The same of a stage that owes no rows: its interpreter may be busy with a transfer agent."""
LOADING_HEARTBEATS = 240
"""The same of a stage that loads its model."""
_HEADER = struct.Struct("<BQ")
_MOST_BYTES = 1 << 34
_CLOSE_S = 5.0
_CHUNK_BYTES = 1 << 24
"""Memory for a frame is taken as its bytes arrive."""


class FrameKind(enum.IntEnum):
    """What a frame is."""

    HEARTBEAT = 0
    SPEC = 1
    """To a stage: what it loads (`StageSpec`)."""
    REPORT = 2
    """From a stage: its `StageReport`."""
    REPORTS = 3
    """To a stage: those of all stages."""
    READY = 4
    """From a stage: its model is loaded; the process ids of its ranks."""
    FAILED = 5
    """From a stage: why it can't go on; it ends."""
    ROWS_PER_CALL = 6
    """To a stage: how many rows torch's products take in one call."""
    COPIES = 7
    """To a stage: blocks to be copied before the next micro-batch (`StepCopies`)."""
    ASK_NUMERICS = 13
    """To a stage: with which kernels does it compute?"""
    NUMERICS = 14
    """From a stage: the answer."""
    NUMBERS = 8
    """To a stage: the next micro-batch; its rows follow, unless the stage is the first."""
    ROWS = 9
    """The rows between two stages: from a stage, and to the next one."""
    FIGURES = 10
    """From a stage: how its process is (`RankReport`), every few seconds."""
    COPIED = 12
    """From a stage: it has made the copies that it was told last."""
    ADAPTER = 15
    """To a stage: what it is to do with an adapter (`AdapterCommand`)."""
    ADAPTER_ANSWER = 16
    """From a stage: what came of it (`AdapterAnswer`)."""
    CLEAR = 11
    """To a stage: how many of the first blocks are to be filled with zeros."""


class Frame(NamedTuple):
    """One frame that has arrived."""

    kind: FrameKind
    payload: bytearray


class FrameReader:
    """Reads frames in one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(INTERVAL_S)
        self.silence_allowed: int | None = LOADING_HEARTBEATS
        """Intervals without a byte after which the other end is lost; None: it may be silent for ever."""

    def read(self) -> Frame:
        """The next frame that is no heartbeat. Raises RankLost once the other end is gone, silent or not to be
        understood."""
        while True:
            kind, length = _HEADER.unpack(self._exactly(_HEADER.size))
            try:
                known = FrameKind(kind)
            except ValueError:
                raise RankLost(f"sent a frame of the unknown kind {kind}") from None
            if length > _MOST_BYTES:
                raise RankLost(f"sent a frame of {length} bytes; at most {_MOST_BYTES} are allowed")
            payload = self._exactly(length)
            if known is not FrameKind.HEARTBEAT:
                return Frame(known, payload)

    def _exactly(self, length: int) -> bytearray:
        received, silence = bytearray(min(length, _CHUNK_BYTES)), 0
        at = 0
        while at < length:
            if at == len(received):
                received += bytes(min(len(received), length - at))
            try:
                with memoryview(received) as view:
                    count = self._connection.recv_into(view[at:])
            except TimeoutError:
                silence += 1
                if self.silence_allowed is not None and silence > self.silence_allowed:
                    raise RankLost("sends no heartbeats") from None
                continue
            except OSError as error:
                raise RankLost(f"has lost its connection ({error})") from error
            if not count:
                raise RankLost("has closed its connection")
            at, silence = at + count, 0
        return received


class FrameWriter:
    """Sends frames from a thread of its own, in the order of `send`, and heartbeats between them."""

    def __init__(self, connection: socket.socket, name: str, on_lost: Callable[[str], None]) -> None:
        """`on_lost` is called once with the reason, in the writer's thread, when the connection fails."""
        self._connection = connection
        # Between two processes a frame may wait as long as the other end computes: whoever reads notices its end.
        self._connection.settimeout(None)
        self._frames: queue.SimpleQueue[tuple[FrameKind, bytes | bytearray | memoryview] | None] = queue.SimpleQueue()
        self._on_lost = on_lost
        self._thread = threading.Thread(target=self._run, name=f"baton-{name}", daemon=True)
        self._thread.start()

    def send(self, kind: FrameKind, payload: bytes | bytearray | memoryview = b"") -> None:
        """Queue a frame; its bytes must not change any more. Called from any thread."""
        self._frames.put((kind, payload))

    def close(self) -> None:
        """End the thread when what was queued is sent, or after some seconds; idempotent. `cut` the connection to end
        it at once."""
        self._frames.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while True:
                try:
                    frame = self._frames.get(timeout=INTERVAL_S)
                except queue.Empty:
                    frame = (FrameKind.HEARTBEAT, b"")
                if frame is None:
                    return
                kind, payload = frame
                self._connection.sendall(_HEADER.pack(kind, len(payload)))
                if payload:
                    self._connection.sendall(payload)
        except Exception as error:
            self._on_lost(f"can't be sent anything ({error!r})")


def heartbeat() -> bytes:
    """The bytes of a heartbeat."""
    return _HEADER.pack(FrameKind.HEARTBEAT, 0)


def cut(connection: socket.socket) -> None:
    """Make all reading and writing of a connection end, in every thread; idempotent."""
    with contextlib.suppress(OSError):  # it is cut or closed already
        # Not unwrapped where it is TLS: the other end may not answer.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True, eq=False)
class StageLinks:
    """One end of the connections between the leading stage and another one. `down` and `up`
    carry frames one way, so that no two threads use a TLS connection at once; `moves` belongs to the thread that moves
    blocks."""

    name: str
    """The other end, for messages: `rank 1 at 10.0.0.2`."""
    down: socket.socket
    """From the leading stage to the other one."""
    up: socket.socket
    """From the other stage to the leading one."""
    moves: socket.socket
    """Between the leading stage's and the other stage's transfers of KV blocks; both ways."""
    host: str = ""
    """The address of the other end's host; empty: this host."""

    @classmethod
    def pair(cls, rank: int) -> tuple[StageLinks, StageLinks]:
        """The leading stage's end and that of a rank, within one machine."""
        downs, ups, moves = socket.socketpair(), socket.socketpair(), socket.socketpair()
        leader = cls(f"rank {rank}", downs[0], ups[0], moves[0])
        return leader, cls("the leader", downs[1], ups[1], moves[1])

    @property
    def sockets(self) -> tuple[socket.socket, socket.socket, socket.socket]:
        return self.down, self.up, self.moves

    def cut(self) -> None:
        """End everything that waits at a connection, here and at the other end; idempotent."""
        for connection in self.sockets:
            cut(connection)

    def close(self) -> None:
        """Close this end; idempotent. No thread may use it any more."""
        for connection in self.sockets:
            connection.close()

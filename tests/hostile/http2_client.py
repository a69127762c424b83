"""An HTTP/2 client for attacks that respects flow control windows and no other rule of the protocol."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable

from tests.hostile.peers import PREFACE, Answers, Talk, send
from tests.support.http2_frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)

GREETING = PREFACE + frame(SETTINGS, 0, 0)
_FRAME_BYTES = 16_384
_WINDOW_BYTES = 65_535
_INITIAL_WINDOW = 4


class WindowedClient:
    """One connection. It waits for windows before it sends. Raises OSError when the other side has closed it."""

    def __init__(self, connection: socket.socket, over: threading.Event, answers: Answers) -> None:
        self._answers = answers
        self._connection = connection
        self._over = over
        self._read = b""
        self._windows: Counter[int] = Counter({0: _WINDOW_BYTES})
        self._initial = _WINDOW_BYTES
        self.ended: set[int] = set()
        """The streams that were answered or reset."""
        # The server may send without limit.
        self._write(GREETING + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", (1 << 31) - 1 - _WINDOW_BYTES)))

    def _write(self, data: bytes) -> None:
        send(self._connection, data, self._over)

    def open(self, stream: int, block: bytes) -> None:
        self._windows[stream] += self._initial
        self._write(frame(HEADERS, END_HEADERS, stream, block))

    def send(self, stream: int, data: bytes, *, ends: bool = False, frame_bytes: int = _FRAME_BYTES) -> None:
        """Send data on a stream, in frames of this size, unless the stream has ended."""
        at = 0
        while at < len(data) and stream not in self.ended and not self._over.is_set():
            fits = min(self._windows[0], self._windows[stream], len(data) - at)
            if fits <= 0:
                self.listen()
                continue
            piece = data[at : at + fits]
            frames = (piece[i : i + frame_bytes] for i in range(0, len(piece), frame_bytes))
            self._write(b"".join(frame(DATA, 0, stream, one) for one in frames))
            self._windows.subtract({0: fits, stream: fits})
            at += fits
        if ends and stream not in self.ended:
            self._write(frame(DATA, END_STREAM, stream))

    def wait_for_answer(self, stream: int) -> None:
        """Wait until a stream has ended."""
        while stream not in self.ended and not self._over.is_set():
            self.listen()

    def listen(self) -> None:
        """Process received frames, or wait a moment for some."""
        try:
            got = self._connection.recv(1 << 16)
        except TimeoutError:
            return
        if not got:
            raise ConnectionResetError
        self._read += got
        while len(self._read) >= 9:
            stop = 9 + int.from_bytes(self._read[:3], "big")
            if len(self._read) < stop:
                return
            kind, flags, stream = self._read[3], self._read[4], int.from_bytes(self._read[5:9], "big")
            payload, self._read = self._read[9:stop], self._read[stop:]
            self._take(kind, flags, stream, payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == GOAWAY:
            raise ConnectionResetError
        if kind == WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == _INITIAL_WINDOW:
                    self._windows.update({open_one: value - self._initial for open_one in self._windows if open_one})
                    self._initial = value
            self._write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._write(frame(PING, ACK, 0, payload))
        elif kind == RST_STREAM or (flags & END_STREAM and kind in (HEADERS, DATA)):
            self._answers["reset" if kind == RST_STREAM else "answered"] += 1
            self.ended.add(stream)


WindowedTalk = Callable[[WindowedClient, threading.Event, int], None]


def windowed(talk: WindowedTalk) -> Talk:
    """Adapt a talk with windows for `flood`."""
    return lambda connection, over, number, answers: talk(WindowedClient(connection, over, answers), over, number)

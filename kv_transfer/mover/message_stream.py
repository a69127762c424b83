"""Messages over a connected stream socket: between two processes of one host, or of two, over TLS.

A frame is a length in 4 bytes, the most significant first, and so many bytes. All calls of the socket are made by the
thread that runs `MessageStream.run`, since OpenSSL allows one thread at a time; others only queue what is to be sent.
The socket may be handed on when `run` has returned because of `leave`: what is read is never more than a frame.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable

from baton.errors import BatonError

MAX_FRAME = 16 << 20
"""Bytes of the longest message. A read of 100,000 ranges has a tenth of it."""
MAX_QUEUED = 64 << 20
"""Bytes of messages that may wait to be sent."""
_HEADER = 4
_READ_AT_ONCE = 1 << 18
_FRAMES_AT_ONCE = 64
"""After so many frames it is time to send something."""


class StreamLost(BatonError):
    """The stream to another process of this node has ended, or what it carries is no message."""


class StreamEnded(StreamLost):
    """The other process has ended the stream, or is gone."""


class MessageStream:
    """One end of a stream of messages."""

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        stream.setblocking(False)
        with contextlib.suppress(OSError):
            # Messages are short, and each is waited for. A socket that is not TCP refuses.
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self._outbox: deque[memoryview] = deque()
        self._queued = 0
        self._wake_write = -1
        """The end of a pipe that wakes `run`; -1: it does not run."""
        self._leaving = self._is_cut = self._is_over = False
        self._frame = bytearray()
        """The header or the body that is being read."""
        self._missing = _HEADER
        self._in_body = False
        self._wants_write = self._wants_read = False
        """What TLS waits for before the read, or the write, can go on."""

    def send(self, frame: bytes) -> None:
        """Queue a message, from any thread; it is dropped once `run` has returned.

        Raises StreamLost if it is too long, or if the other end reads nothing.
        """
        if len(frame) > MAX_FRAME:
            raise StreamLost(f"a message of {len(frame)} bytes is longer than {MAX_FRAME}")
        data = memoryview(len(frame).to_bytes(_HEADER, "big") + frame)
        with self._lock:
            if self._is_over:
                return
            if self._queued + len(data) > MAX_QUEUED:
                raise StreamLost(f"the other end does not read: {self._queued} bytes wait to be sent")
            self._outbox.append(data)
            self._queued += len(data)
            self._wake()

    def leave(self) -> None:
        """Make `run` return once what is queued was sent and no frame is half read. From any thread."""
        with self._lock:
            self._leaving = True
            self._wake()

    def cut(self) -> None:
        """Make `run` end the stream at once, for both ends. From any thread."""
        with self._lock:
            self._is_cut = True
            self._wake()

    def run(self, received: Callable[[bytes], None]) -> None:
        """Send and receive until `leave` is called; `received` is called with each message, in this thread.

        Raises StreamLost when the stream ends, and what `received` raises. The other end then finds the stream ended.
        """
        poll = select.poll()
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with self._lock:
            self._wake_write = wake_write
        poll.register(wake_read, select.POLLIN)
        try:
            while True:
                may_have_more = self._receive(received)
                self._transmit()
                if self._has_left():
                    return
                writes = self._wants_write or (bool(self._outbox) and not self._wants_read)
                if self._is_cut or self._socket.fileno() < 0:
                    raise StreamEnded("the stream was cut")
                poll.register(self._socket, select.POLLIN | (select.POLLOUT if writes else 0))
                poll.poll(0 if may_have_more else None)
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
        except BaseException:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            raise
        finally:
            with self._lock:
                os.close(wake_read)
                os.close(wake_write)
                self._wake_write, self._is_over = -1, True

    def _wake(self) -> None:
        if self._wake_write >= 0:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"x")

    def _has_left(self) -> bool:
        with self._lock:
            return self._leaving and not self._outbox and not self._in_body and self._missing == _HEADER

    def _receive(self, received: Callable[[bytes], None]) -> bool:
        """Read what has come; returns whether there may be more."""
        self._wants_write = False
        num_frames = 0
        while num_frames < _FRAMES_AT_ONCE:
            try:
                data = self._socket.recv(min(self._missing, _READ_AT_ONCE))
            except (BlockingIOError, ssl.SSLWantReadError):
                return False
            except ssl.SSLWantWriteError:
                self._wants_write = True
                return False
            except OSError as error:
                raise StreamEnded(f"the stream has failed: {error!r}") from None  # whoever logs it has its words
            if not data:
                raise StreamEnded("the other process has ended the stream")
            self._frame += data
            self._missing -= len(data)
            if self._missing:
                continue
            frame, self._frame = bytes(self._frame), bytearray()
            if self._in_body:
                self._in_body, self._missing = False, _HEADER
                num_frames += 1
                received(frame)
                continue
            length = int.from_bytes(frame, "big")
            if not 0 < length <= MAX_FRAME:
                raise StreamLost(f"a message of {length} bytes was announced, not of 1 to {MAX_FRAME}")
            self._in_body, self._missing = True, length
        return True

    def _transmit(self) -> None:
        self._wants_read = False
        while self._outbox:
            data = self._outbox[0]
            try:
                sent = self._socket.send(data)
            except (BlockingIOError, ssl.SSLWantWriteError):
                return
            except ssl.SSLWantReadError:
                self._wants_read = True
                return
            except OSError as error:
                raise StreamEnded(f"the stream has failed: {error!r}") from None  # whoever logs it has its words
            with self._lock:
                self._queued -= sent
                if sent < len(data):
                    self._outbox[0] = data[sent:]
                else:
                    self._outbox.popleft()

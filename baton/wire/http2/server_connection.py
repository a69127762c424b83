"""The server's end of an HTTP/2 connection (RFC 9113), without I/O: bytes in, events out, and bytes to send.

It keeps the rules of `baton.wire.http2.connection`. Trailers are sent behind the DATA that waits in their stream.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton.wire.http2.connection import Connection, Stream
from baton.wire.http2.flood_guard import FloodGuard
from baton.wire.http2.frames import (
    END_STREAM,
    INITIAL_WINDOW,
    MAX_HEADER_LIST,
    MAX_STREAMS,
    NO_ERROR,
    PING,
    PREFACE,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    ConnectionFault,
    frame,
    header_frames,
)
from baton.wire.http2.header_blocks import Header, are_plain, content_length, is_request

_STREAM_WINDOW = 1 << 20
MAX_STREAMS_OPEN = 10_000
_STREAMS_PER_USELESS = 100
"""A change of all windows counts as one useless frame for so many streams."""
_MAX_ABANDONED = 1_000


@dataclass(slots=True)
class RequestReceived:
    """A stream was opened."""

    stream: int
    headers: Sequence[Header] | None
    """None: there are too many, or they are too large."""
    is_ended: bool
    """Whether no body follows."""


@dataclass(slots=True)
class DataReceived:
    """A part of a request's body has come."""

    stream: int
    data: bytes
    is_ended: bool
    """Whether this is the last part."""


@dataclass(slots=True)
class StreamReset:
    """A stream has ended early: the peer has reset it, or broken a rule in it."""

    stream: int


@dataclass(slots=True)
class StreamWritable:
    """All DATA that waited in a stream has been sent."""

    stream: int


Event: TypeAlias = RequestReceived | DataReceived | StreamReset | StreamWritable


class _ServerStream(Stream):
    __slots__ = ("missing_bytes", "trailers")

    def __init__(self, send_window: int) -> None:
        super().__init__(send_window, _STREAM_WINDOW)
        self.missing_bytes: int | None = None
        """Bytes of the body that are still missing by its content-length; None: there was no content-length."""
        self.trailers: bytes | None = None
        """The header block that ends the answer; None until the answer's end is known."""


class ServerConnection(Connection[_ServerStream]):
    """A server's end of one connection."""

    def __init__(self, max_header_bytes: int, max_streams: int = MAX_STREAMS_OPEN) -> None:
        """`max_header_bytes`: limit of one header list. `max_streams`: limit of the streams that are open at once,
        until `allow_streams` changes it.
        """
        settings = struct.pack(
            ">HIHIHI", MAX_STREAMS, max_streams, INITIAL_WINDOW, _STREAM_WINDOW, MAX_HEADER_LIST, max_header_bytes
        )
        super().__init__([frame(SETTINGS, 0, 0, settings)], _STREAM_WINDOW, max_header_bytes)
        self.guard = FloodGuard()
        self._max_streams = max_streams
        self._last_stream = 0
        """The highest number that the peer has opened."""
        self._num_preface_bytes = 0
        """Bytes of the preface that have come."""
        self._abandoned: dict[int, None] = {}
        """Streams that we ended before the peer did, the oldest first: what it still sends in them is ignored."""
        self._abandoned_up_to = 0
        """Any stream up to this number may be such a one."""
        self._num_untaken = 0
        """Answered streams whose answers are among the unsent bytes."""
        self._num_useless_unsent = 0
        """Number of unsent frames that only answer useless frames."""
        self._is_leaving = False
        self._events: list[Event] = []

    def take(self) -> bytes:
        """Remove and return the bytes to send now."""
        self.guard.sent(len(self._unsent) - self._num_useless_unsent)
        self._num_untaken = self._num_useless_unsent = 0
        return super().take()

    @property
    def has_greeted(self) -> bool:
        """Whether the peer has sent the connection preface and its SETTINGS (3.4)."""
        return self._frames.has_settings

    def is_open(self, number: int) -> bool:
        """Whether a stream is not over: a part of its answer may wait for the peer's windows."""
        return number in self._streams

    def allow_streams(self, max_streams: int) -> None:
        """Change how many streams may be open at once, and send the peer the new setting."""
        if max_streams != self._max_streams:
            self._max_streams = max_streams
            self._unsent.append(frame(SETTINGS, 0, 0, struct.pack(">HI", MAX_STREAMS, max_streams)))

    # Receiving.

    def receive(self, data: bytes) -> Sequence[Event]:
        """Parse these bytes and return their events. Raises ConnectionFault, after which only `take` may be called."""
        self._events = []
        try:
            self._receive_frames(self._without_preface(data))
        except ConnectionFault as fault:
            self._leave(fault.code)
            raise
        return self._events

    def _without_preface(self, data: bytes) -> bytes:
        if self._num_preface_bytes == len(PREFACE):
            return data
        expected = PREFACE[self._num_preface_bytes :]
        if not data.startswith(expected[: len(data)]):
            raise ConnectionFault(PROTOCOL_ERROR, "the connection preface is missing: the peer does not speak HTTP/2")
        self._num_preface_bytes += min(len(data), len(expected))
        return data[len(expected) :]

    def _check_stream(self, number: int) -> None:
        if not number & 1 or number > self._last_stream:
            raise ConnectionFault(PROTOCOL_ERROR, "a frame names a stream that was not opened")

    def _on_headers(self, number: int, headers: Sequence[Header] | None, *, is_last: bool) -> None:
        if not number & 1:
            raise ConnectionFault(PROTOCOL_ERROR, "clients open streams of odd numbers")
        if number <= self._last_stream:
            self._on_trailers(number, headers, is_last=is_last)
            return
        self._last_stream = number
        # An answer that the peer does not take costs as much as an open stream.
        if self._is_leaving or len(self._streams) + self._num_untaken >= self._max_streams:
            self._abandon(number)
            self._answer_reset(number, REFUSED_STREAM)
            return
        stream = self._streams[number] = _ServerStream(self._initial_send_window)
        stream.is_remote_closed = is_last
        if headers is not None:
            if not is_request(headers):
                self._break_stream(number, PROTOCOL_ERROR, "the headers are no request")
                return
            stream.missing_bytes = content_length(headers)
            if is_last and stream.missing_bytes:
                self._break_stream(number, PROTOCOL_ERROR, "the body is shorter than its content-length")
                return
        self._events.append(RequestReceived(number, headers, is_last))

    def _on_trailers(self, number: int, headers: Sequence[Header] | None, *, is_last: bool) -> None:
        stream = self._streams.get(number)
        if stream is None:
            self._on_late_frame(number)
        elif stream.is_remote_closed:
            self._break_stream(number, STREAM_CLOSED, "trailers behind END_STREAM")
        elif not is_last or stream.missing_bytes or (headers is not None and not are_plain(headers)):
            self._break_stream(number, PROTOCOL_ERROR, "trailers that are none")
        else:
            stream.is_remote_closed = True
            self._events.append(DataReceived(number, b"", is_ended=True))

    def _on_body(self, number: int, stream: _ServerStream, data: bytes, *, is_last: bool) -> None:
        if stream.missing_bytes is not None:
            stream.missing_bytes -= len(data)
            if stream.missing_bytes < 0 or (is_last and stream.missing_bytes):
                self._break_stream(number, PROTOCOL_ERROR, "the body is not as long as its content-length")
                return
        if data or is_last:
            self._events.append(DataReceived(number, data, is_last))

    def _on_reset(self, number: int, code: int) -> None:
        if self._close_stream(number) is None:
            self.guard.count_useless()
            return
        self.guard.count_reset()
        self._events.append(StreamReset(number))

    def _on_goaway(self, payload: bytes) -> None:
        self.guard.count_useless()  # we open no streams that it could concern

    def _on_late_frame(self, number: int) -> None:
        if number > self._abandoned_up_to and number not in self._abandoned:
            raise ConnectionFault(STREAM_CLOSED, "a frame for a stream that the peer had ended")
        self.guard.count_useless()

    def _on_writable(self, number: int) -> None:
        self._events.append(StreamWritable(number))

    def _resize_send_windows(self, initial_window: int) -> None:
        # One small frame makes us look at every stream.
        self.guard.count_useless(len(self._streams) // _STREAMS_PER_USELESS)
        super()._resize_send_windows(initial_window)

    def _break_stream(self, number: int, code: int, detail: str) -> None:
        self._answer_reset(number, code)
        self._close_stream(number)
        self._abandon(number)
        self.guard.count_reset()
        self._events.append(StreamReset(number))

    def _abandon(self, number: int) -> None:
        self._abandoned[number] = None
        if len(self._abandoned) > _MAX_ABANDONED:
            oldest = next(iter(self._abandoned))
            del self._abandoned[oldest]
            self._abandoned_up_to = max(self._abandoned_up_to, oldest)

    def _count_useless(self, times: int = 1) -> None:
        self.guard.count_useless(times)

    def _answer(self, answer: bytes) -> None:
        self.guard.count_useless()
        self._num_useless_unsent += 1
        self._unsent.append(answer)

    def _answer_reset(self, number: int, code: int) -> None:
        self._answer(frame(RST_STREAM, 0, number, struct.pack(">I", code)))

    # Sending.

    def send_headers(self, number: int, block: bytes) -> None:
        """Send the answer's first header block; does nothing for a stream that is over."""
        if number in self._streams:
            self._unsent += header_frames(number, 0, block)

    def send(self, number: int, data: bytes) -> bool:
        """Send a part of the answer's body. False: some of it waits for the peer's windows, and StreamWritable will say
        when it is out. Does nothing for a stream that is over.
        """
        stream = self._streams.get(number)
        return stream is None or self._send_data(number, stream, data)

    def finish(self, number: int, block: bytes) -> None:
        """Send the header block that ends the answer, behind the body that waits. The stream is over then. Does nothing
        for a stream that is over.
        """
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.trailers = block
        if stream.unsent is None:
            self._send_trailers(number, stream)

    def end(self, number: int, block: bytes) -> None:
        """Send the header block that ends the answer, and drop the body that waits."""
        stream = self._streams.get(number)
        if stream is not None:
            stream.unsent, stream.trailers = None, block
            self._send_trailers(number, stream)

    def refuse(self, number: int, block: bytes) -> None:
        """Answer a request that is not looked at, as `finish`. It counts as useless; raises ConnectionFault."""
        before = len(self._unsent)
        self.finish(number, block)
        self._num_useless_unsent += len(self._unsent) - before
        try:
            self.guard.count_useless()
        except ConnectionFault as fault:
            self._leave(fault.code)
            raise

    def ping(self) -> None:
        """Send a PING, which a live peer answers."""
        self._unsent.append(frame(PING, 0, 0, b"baton---"))

    def leave(self) -> None:
        """Send GOAWAY: open streams go on, new ones are refused. Idempotent."""
        if not self._is_leaving:
            self._leave(NO_ERROR)

    def _leave(self, code: int) -> None:
        self._is_leaving = True
        self._send_goaway(self._last_stream, code)

    def _on_all_sent(self, number: int, stream: _ServerStream) -> None:
        if stream.trailers is not None:
            self._send_trailers(number, stream)

    def _send_trailers(self, number: int, stream: _ServerStream) -> None:
        assert stream.trailers is not None
        self._unsent += header_frames(number, END_STREAM, stream.trailers)
        if not stream.is_remote_closed:
            # The rest of the request is of no use any more (8.1).
            self._send_reset(number, NO_ERROR)
            self._abandon(number)
        self.guard.count_answer()
        self._num_untaken += 1
        self._close_stream(number)

"""The part of an HTTP/2 connection that servers and clients share (RFC 9113). Does no I/O.

`receive` takes the peer's bytes, `take` returns the bytes to send. `ServerConnection` and `ClientConnection` add which
end opens streams, and where requests and answers are reported.

The rules of both ends:

1. A connection error (5.4.1) ends the connection: `receive` raises ConnectionFault, and `take` has the GOAWAY frame. A
   stream error (5.4.2) resets that stream, and costs no other one anything.
2. DATA that was received is credited to the peer's windows at once. Its receiver limits how much of it is kept.
3. DATA is sent within the peer's windows (5.2). What does not fit waits in its stream, in order.
4. What a peer can make us do at a small cost of its own is counted: frames that only ask for an answer or for nothing,
   header blocks without an end, streams that are opened only to be reset.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from baton.wire.http2.frames import (
    ACK,
    COMPRESSION_ERROR,
    DATA,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    LARGEST_FRAME,
    LARGEST_WINDOW,
    MAX_FRAME,
    MAX_FRAME_BYTES,
    PADDED,
    PING,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    ConnectionFault,
    FrameReader,
    frame,
    uint32,
    without_padding,
)
from baton.wire.http2.header_blocks import BrokenHeaders, Header, HeaderReader

_CONNECTION_WINDOW = 16 << 20
_TINY_BYTES = 16
"""A DATA frame with fewer bytes, and more behind it, is hardly worth its header."""


class Stream:
    """The flow control of one open stream, and the DATA that waits for it."""

    __slots__ = ("ends_with_data", "is_remote_closed", "receive_window", "send_window", "unsent")

    def __init__(self, send_window: int, receive_window: int) -> None:
        self.send_window = send_window
        """Bytes that we may send to the peer; may be negative (6.9.2)."""
        self.receive_window = receive_window
        """Bytes that the peer may send."""
        self.is_remote_closed = False
        """Whether the peer has sent END_STREAM."""
        self.unsent: bytearray | None = None
        """DATA that does not fit into the peer's windows yet."""
        self.ends_with_data = False
        """Whether the last DATA frame carries END_STREAM, since no trailers follow."""


StreamT = TypeVar("StreamT", bound=Stream)


class Connection(ABC, Generic[StreamT]):
    """The state of one end of a connection. It belongs to one thread, and acts only when it is called."""

    def __init__(self, opening: Sequence[bytes], stream_window: int, max_header_bytes: int) -> None:
        """`opening`: the bytes that are sent first, up to our SETTINGS. `stream_window`: bytes that the peer may send
        in each stream before they are credited. `max_header_bytes`: limit of one header list
        (SETTINGS_MAX_HEADER_LIST_SIZE, 6.5.2).
        """
        self._headers = HeaderReader(max_header_bytes)
        self._frames = FrameReader(2 * max_header_bytes)
        self._streams: dict[int, StreamT] = {}
        """The open streams by number."""
        self._send_window = DEFAULT_WINDOW
        self._initial_send_window = DEFAULT_WINDOW
        """The send window of each new stream: the peer's SETTINGS_INITIAL_WINDOW_SIZE."""
        self._stream_window = stream_window
        self._receive_window = _CONNECTION_WINDOW
        self._starved: OrderedDict[int, None] = OrderedDict()
        """Streams that wait for the connection's window, the longest waiting first."""
        grow = struct.pack(">I", _CONNECTION_WINDOW - DEFAULT_WINDOW)
        self._unsent: list[bytes] = [*opening, frame(WINDOW_UPDATE, 0, 0, grow)]

    @property
    def num_open(self) -> int:
        """The number of open streams."""
        return len(self._streams)

    def take(self) -> bytes:
        """Remove and return the bytes to send now."""
        data = b"".join(self._unsent)
        self._unsent.clear()
        return data

    # The methods that differ between server and client.

    @abstractmethod
    def _check_stream(self, number: int) -> None:
        """Raise ConnectionFault if the peer may not send frames about this stream, since it was never opened (5.1)."""

    @abstractmethod
    def _on_headers(self, number: int, headers: Sequence[Header] | None, *, is_last: bool) -> None:
        """Handle a header list; None: it is larger than we take. `is_last`: END_STREAM is set."""

    @abstractmethod
    def _on_body(self, number: int, stream: StreamT, data: bytes, *, is_last: bool) -> None:
        """Handle a part of a message body. `is_last`: END_STREAM is set."""

    @abstractmethod
    def _on_reset(self, number: int, code: int) -> None:
        """Handle the end of a stream by RST_STREAM; the stream may be over already."""

    @abstractmethod
    def _on_goaway(self, payload: bytes) -> None:
        """Handle a GOAWAY frame."""

    @abstractmethod
    def _break_stream(self, number: int, code: int, detail: str) -> None:
        """Reset a stream in which the peer broke a rule (stream error, 5.4.2)."""

    @abstractmethod
    def _answer(self, answer: bytes) -> None:
        """Send a frame that only answers the peer's; raises ConnectionFault if the peer asks for too many."""

    def _on_late_frame(self, number: int) -> None:
        """Handle a frame for a stream that is over (5.1, "closed")."""

    def _count_useless(self, times: int = 1) -> None:
        """Count frames that cost us more than the peer; may raise ConnectionFault."""

    def _on_all_sent(self, number: int, stream: StreamT) -> None:
        """Go on with a stream whose waiting DATA is out."""

    def _on_writable(self, number: int) -> None:
        """Report that a window update or a setting let all waiting DATA of a stream out."""

    # Receiving.

    def _receive_frames(self, data: bytes) -> None:
        for kind, flags, number, payload in self._frames.read(data):
            if kind == DATA:
                self._on_data(flags, number, payload)
            elif kind == HEADERS:
                self._on_header_block(flags, number, payload)
            elif kind == WINDOW_UPDATE:
                self._on_window_update(number, uint32(payload) & LARGEST_WINDOW)
            elif kind == RST_STREAM:
                code = uint32(payload)
                self._check_stream(number)
                self._on_reset(number, code)
            elif kind == SETTINGS:
                self._on_settings(flags, number, payload)
            elif kind == PING:
                self._on_ping(flags, number, payload)
            elif kind == PRIORITY:
                self._on_priority(number, payload)
            elif kind == PUSH_PROMISE:
                raise ConnectionFault(PROTOCOL_ERROR, "a push was promised, which clients must not do and we disabled")
            elif kind == GOAWAY:
                if number:
                    raise ConnectionFault(PROTOCOL_ERROR, "a GOAWAY frame names a stream")
                self._on_goaway(payload)
            else:
                self._count_useless()  # of a kind that we don't know (4.1)

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        self._check_stream(number)
        self._receive_window -= len(payload)
        if self._receive_window < 0:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "more DATA than the connection's window takes")
        if self._receive_window < _CONNECTION_WINDOW // 2:
            self._send_credit(0, _CONNECTION_WINDOW - self._receive_window)
            self._receive_window = _CONNECTION_WINDOW
        data = without_padding(payload) if flags & PADDED else payload
        is_last = bool(flags & END_STREAM)
        if len(data) < _TINY_BYTES and not is_last:
            self._count_useless()
        stream = self._streams.get(number)
        if stream is None:
            self._on_late_frame(number)
            return
        stream.receive_window -= len(payload)
        if stream.is_remote_closed:
            self._break_stream(number, STREAM_CLOSED, "DATA behind END_STREAM")
            return
        if stream.receive_window < 0:
            self._break_stream(number, FLOW_CONTROL_ERROR, "more DATA than the stream's window takes")
            return
        if is_last:
            stream.is_remote_closed = True
        elif stream.receive_window < self._stream_window // 2:
            self._send_credit(number, self._stream_window - stream.receive_window)
            stream.receive_window = self._stream_window
        self._on_body(number, stream, data, is_last=is_last)

    def _send_credit(self, number: int, num_bytes: int) -> None:
        self._unsent.append(frame(WINDOW_UPDATE, 0, number, struct.pack(">I", num_bytes)))

    def _on_header_block(self, flags: int, number: int, block: bytes) -> None:
        try:
            headers = self._headers.read(block)
        except BrokenHeaders as error:
            # The table of headers may be wrong now, which all later blocks refer to.
            raise ConnectionFault(COMPRESSION_ERROR, str(error)) from error
        self._on_headers(number, headers, is_last=bool(flags & END_STREAM))

    def _on_priority(self, number: int, payload: bytes) -> None:
        """Check a frame whose meaning is deprecated (5.3.2)."""
        if number == 0:
            raise ConnectionFault(PROTOCOL_ERROR, "a PRIORITY frame names no stream")
        if len(payload) != 5:
            raise ConnectionFault(FRAME_SIZE_ERROR, "a PRIORITY frame is not 5 bytes long")
        if uint32(payload[:4]) & LARGEST_WINDOW == number:
            raise ConnectionFault(PROTOCOL_ERROR, "a stream depends on itself")
        self._count_useless()

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(PROTOCOL_ERROR, "a SETTINGS frame names a stream")
        if len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionFault(FRAME_SIZE_ERROR, "a SETTINGS frame is not a list of settings")
        if flags & ACK:
            return
        initial_window = self._initial_send_window
        for key, value in struct.iter_unpack(">HI", payload):
            # Only windows change what we do: our frames have the least size, and our header blocks use no table.
            if key == INITIAL_WINDOW:
                if value > LARGEST_WINDOW:
                    raise ConnectionFault(FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is above 2^31-1")
                initial_window = value
            elif key == ENABLE_PUSH and value > 1:
                raise ConnectionFault(PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is neither 0 nor 1")
            elif key == MAX_FRAME and not MAX_FRAME_BYTES <= value <= LARGEST_FRAME:
                raise ConnectionFault(PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of bounds")
        # The acknowledgement comes before any DATA: until the peer reads it, it counts by its old windows (6.5.3).
        self._answer(frame(SETTINGS, ACK, 0, b""))
        if initial_window != self._initial_send_window:
            self._resize_send_windows(initial_window)

    def _resize_send_windows(self, initial_window: int) -> None:
        grown, self._initial_send_window = initial_window - self._initial_send_window, initial_window
        for number, stream in list(self._streams.items()):
            stream.send_window += grown
            if stream.send_window > LARGEST_WINDOW:
                raise ConnectionFault(FLOW_CONTROL_ERROR, "a stream's window grows above 2^31-1")
            self._resume(number, stream)

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(PROTOCOL_ERROR, "a PING frame names a stream")
        if len(payload) != 8:
            raise ConnectionFault(FRAME_SIZE_ERROR, "a PING frame is not 8 bytes long")
        if flags & ACK:
            self._count_useless()
        else:
            self._answer(frame(PING, ACK, 0, payload))

    def _on_window_update(self, number: int, increment: int) -> None:
        self._count_useless()
        if number == 0:
            self._send_window += increment
            if not increment:
                raise ConnectionFault(PROTOCOL_ERROR, "the connection's window grows by 0")
            if self._send_window > LARGEST_WINDOW:
                raise ConnectionFault(FLOW_CONTROL_ERROR, "the connection's window grows above 2^31-1")
            while self._starved and self._send_window > 0:
                longest, _ = self._starved.popitem(last=False)
                self._resume(longest, self._streams[longest])
            return
        self._check_stream(number)
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.send_window += increment
        if not increment:
            self._break_stream(number, PROTOCOL_ERROR, "the stream's window grows by 0")
        elif stream.send_window > LARGEST_WINDOW:
            self._break_stream(number, FLOW_CONTROL_ERROR, "the stream's window grows above 2^31-1")
        else:
            self._resume(number, stream)

    # Sending.

    def _send_data(self, number: int, stream: StreamT, data: bytes) -> bool:
        """Send a part of a message body; False: some of it waits for the peer's windows."""
        size = len(data)
        if stream.unsent is None:
            if size <= stream.send_window and size <= self._send_window and size <= MAX_FRAME_BYTES:
                stream.send_window -= size
                self._send_window -= size
                self._unsent.append(FRAME.pack(size << 8 | DATA, END_STREAM if stream.ends_with_data else 0, number))
                self._unsent.append(data)
                return True
            stream.unsent = bytearray(data)
        else:
            stream.unsent += data
        return self._send_waiting(number, stream)

    def _resume(self, number: int, stream: StreamT) -> None:
        """Send what waits in a stream, as far as the windows take it now."""
        if stream.unsent is not None and self._send_waiting(number, stream):
            self._on_writable(number)

    def _send_waiting(self, number: int, stream: StreamT) -> bool:
        """Send what waits in a stream, as far as the windows take it. False: some of it still waits."""
        assert stream.unsent is not None
        while stream.unsent:
            size = min(len(stream.unsent), stream.send_window, self._send_window, MAX_FRAME_BYTES)
            if size <= 0:
                if stream.send_window > 0:
                    self._starved[number] = None
                return False
            stream.send_window -= size
            self._send_window -= size
            flags = END_STREAM if stream.ends_with_data and size == len(stream.unsent) else 0
            self._unsent.append(frame(DATA, flags, number, bytes(stream.unsent[:size])))
            del stream.unsent[:size]
        stream.unsent = None
        self._on_all_sent(number, stream)
        return True

    def _send_reset(self, number: int, code: int) -> None:
        self._unsent.append(frame(RST_STREAM, 0, number, struct.pack(">I", code)))

    def _send_goaway(self, last_stream: int, code: int) -> None:
        self._unsent.append(frame(GOAWAY, 0, 0, struct.pack(">II", last_stream, code)))

    def _close_stream(self, number: int) -> StreamT | None:
        """Forget a stream with what waits in it; None: it was over already."""
        self._starved.pop(number, None)
        return self._streams.pop(number, None)

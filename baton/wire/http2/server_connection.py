"""One HTTP/2 connection at the server's end (RFC 9113), without I/O: bytes in, events out, and bytes to be sent.

The rules:

1. A fault against the connection ends it (ConnectionFault, and `take` has the GOAWAY); one against a stream ends that
   stream, and costs no other one anything.
2. What is received goes back to the peer's windows at once. Whoever is handed it bounds what it keeps.
3. What is sent keeps within the peer's windows; what does not fit waits in its stream, in order, with the trailers
   behind it.
4. What a peer can make us say or do for nothing is bounded (`FloodGuard`): answers that it does not read, headers
   without an end, streams that it opens only to reset them.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton.wire.http2.flood_guard import FloodGuard
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
    MAX_HEADER_LIST,
    MAX_STREAMS,
    NO_ERROR,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    ConnectionFault,
    FrameReader,
    frame,
    header_frames,
    number_of,
    unpadded,
)
from baton.wire.http2.header_blocks import BrokenHeaders, Header, HeaderReader
from baton.wire.http2.header_fields import announced_bytes, are_plain, is_request

_STREAM_WINDOW = 1 << 20
_CONNECTION_WINDOW = 16 << 20
MAX_STREAMS_OPEN = 10_000
_STREAMS_PER_USELESS = 100
"""So many streams are looked at for what one frame for nothing may cost."""
_TINY_BYTES = 16
"""DATA below this, with more behind it, is hardly worth its frame."""
_MAX_LEFT = 1_000


@dataclass(slots=True)
class Opened:
    """A stream, and its headers."""

    stream: int
    headers: Sequence[Header] | None
    """None: too many or too large."""
    is_ended: bool


@dataclass(slots=True)
class Received:
    """Of a stream's body."""

    stream: int
    data: bytes
    is_ended: bool


@dataclass(slots=True)
class WasReset:
    """The peer wants no more of a stream, or broke its rules."""

    stream: int


@dataclass(slots=True)
class Writable:
    """What had to wait in a stream is out."""

    stream: int


Event: TypeAlias = Opened | Received | WasReset | Writable


class _Stream:
    """An open stream."""

    __slots__ = ("is_ended", "missing", "receivable", "trailers", "waiting", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        """Bytes that may be sent."""
        self.receivable = _STREAM_WINDOW
        self.is_ended = False
        """The peer sends nothing more."""
        self.missing: int | None = None
        """Bytes of the body that it has announced and not sent; None: it announced nothing."""
        self.waiting: bytearray | None = None
        """What does not fit into the windows yet."""
        self.trailers: bytes | None = None
        """What is sent behind that."""


class Connection:
    """A server's end of one connection. Nobody else may change it, and it does nothing by itself."""

    def __init__(self, max_header_bytes: int, max_streams: int = MAX_STREAMS_OPEN) -> None:
        """`max_streams`: open at once, until `allow_streams` says another number."""
        self._max_streams = max_streams
        self.guard = FloodGuard()
        self._headers = HeaderReader(max_header_bytes)
        self._frames = FrameReader(2 * max_header_bytes)
        self._streams: dict[int, _Stream] = {}
        self._last_stream = 0
        self._preface_read = 0
        """Bytes of it that have come."""
        self._window = DEFAULT_WINDOW
        self._first_window = DEFAULT_WINDOW
        """Of each new stream."""
        self._receivable = _CONNECTION_WINDOW
        self._left: dict[int, None] = {}
        """Streams that we ended and the peer may not know of yet: what it still says of them counts for nothing."""
        self._left_before = 0
        """Up to this one any may be such a stream."""
        self._starved: OrderedDict[int, None] = OrderedDict()
        """Streams that wait for the connection's window, the longest first."""
        self._num_untaken = 0
        """Answers of streams that are over and that the peer can't have read."""
        self._num_useless_unsent = 0
        """Frames that only answer what was for nothing, of those unsent."""
        self._is_leaving = False
        self._events: list[Event] = []
        settings = struct.pack(
            ">HIHIHI", MAX_STREAMS, max_streams, INITIAL_WINDOW, _STREAM_WINDOW, MAX_HEADER_LIST, max_header_bytes
        )
        grow = struct.pack(">I", _CONNECTION_WINDOW - DEFAULT_WINDOW)
        self._unsent: list[bytes] = [frame(SETTINGS, 0, 0, settings), frame(WINDOW_UPDATE, 0, 0, grow)]

    @property
    def num_open(self) -> int:
        """Streams that are not over."""
        return len(self._streams)

    def take(self) -> bytes:
        """What is to be sent now; the caller has sent it then."""
        data = b"".join(self._unsent)
        self.guard.sent(len(self._unsent) - self._num_useless_unsent)
        self._unsent.clear()
        self._num_untaken = self._num_useless_unsent = 0
        return data

    @property
    def has_greeted(self) -> bool:
        """The peer has said what HTTP/2 begins with: its preface and its settings."""
        return self._frames.has_settings

    def is_open(self, stream: int) -> bool:
        """Whether it is not over, or something of its answer waits for the peer's windows."""
        return stream in self._streams

    def allow_streams(self, max_streams: int) -> None:
        """So many may be open at once from now on; the peer is told."""
        if max_streams != self._max_streams:
            self._max_streams = max_streams
            self._unsent.append(frame(SETTINGS, 0, 0, struct.pack(">HI", MAX_STREAMS, max_streams)))

    # What comes.

    def receive(self, data: bytes) -> Sequence[Event]:
        """What these bytes mean. Raises ConnectionFault, after which only `take` is of use."""
        self._events = []
        try:
            for kind, flags, stream, payload in self._frames.read(self._after_preface(data)):
                self._on_frame(kind, flags, stream, payload)
        except ConnectionFault as fault:
            self._leave(fault.code)
            raise
        return self._events

    def _after_preface(self, data: bytes) -> bytes:
        if self._preface_read == len(PREFACE):
            return data
        expected = PREFACE[self._preface_read :]
        if not data.startswith(expected[: len(data)]):
            raise ConnectionFault(PROTOCOL_ERROR, "it does not begin as HTTP/2 does")
        self._preface_read += min(len(data), len(expected))
        return data[len(expected) :]

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if not stream & 1 and stream:
            raise ConnectionFault(PROTOCOL_ERROR, "clients open streams of odd numbers")
        if kind == DATA:
            self._on_data(flags, stream, payload)
        elif kind == HEADERS:
            self._on_block(stream, flags, payload)
        elif kind == WINDOW_UPDATE:
            self._on_window(stream, number_of(payload) & LARGEST_WINDOW)
        elif kind == RST_STREAM:
            self._on_reset(stream, payload)
        elif kind == SETTINGS:
            self._on_settings(flags, stream, payload)
        elif kind == PING:
            self._on_ping(flags, stream, payload)
        elif kind == PRIORITY:
            self._on_priority(stream, payload)
        elif kind == PUSH_PROMISE:
            raise ConnectionFault(PROTOCOL_ERROR, "clients push nothing")
        elif kind == GOAWAY and stream:
            raise ConnectionFault(PROTOCOL_ERROR, "a connection is left, not a stream")
        else:
            self.guard.useless()

    def _on_data(self, flags: int, stream: int, payload: bytes) -> None:
        if stream == 0 or stream > self._last_stream:
            raise ConnectionFault(PROTOCOL_ERROR, "data of a stream that was not opened")
        self._receivable -= len(payload)
        if self._receivable < 0:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "more data than the window takes")
        if self._receivable < _CONNECTION_WINDOW // 2:
            self._give_back(0, _CONNECTION_WINDOW - self._receivable)
            self._receivable = _CONNECTION_WINDOW
        data = unpadded(payload) if flags & PADDED else payload
        if len(data) < _TINY_BYTES and not flags & END_STREAM:
            self.guard.useless()
        state = self._streams.get(stream)
        if state is None:
            self._on_late(stream)
            return
        state.receivable -= len(payload)
        if state.is_ended or state.receivable < 0:
            self._break(stream, STREAM_CLOSED if state.is_ended else FLOW_CONTROL_ERROR)
            return
        state.is_ended = bool(flags & END_STREAM)
        if not state.is_ended and state.receivable < _STREAM_WINDOW // 2:
            self._give_back(stream, _STREAM_WINDOW - state.receivable)
            state.receivable = _STREAM_WINDOW
        if state.missing is not None:
            state.missing -= len(data)
            if state.missing < 0 or (state.is_ended and state.missing):
                self._break(stream, PROTOCOL_ERROR)
                return
        if data or state.is_ended:
            self._events.append(Received(stream, data, state.is_ended))

    def _give_back(self, stream: int, num_bytes: int) -> None:
        self._unsent.append(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", num_bytes)))

    def _on_late(self, stream: int) -> None:
        """Something came for a stream that is over."""
        if stream > self._left_before and stream not in self._left:
            raise ConnectionFault(STREAM_CLOSED, "it goes on with a stream that it had ended")
        self.guard.useless()

    def _on_block(self, stream: int, flags: int, block: bytes) -> None:
        try:
            headers = self._headers.read(block)
        except BrokenHeaders as error:
            raise ConnectionFault(COMPRESSION_ERROR, str(error)) from error
        is_ended = bool(flags & END_STREAM)
        if stream <= self._last_stream:
            self._on_trailers(stream, headers, is_ended)
            return
        self._last_stream = stream
        # An answer that nobody takes costs what an open stream does.
        if self._is_leaving or len(self._streams) + self._num_untaken >= self._max_streams:
            self._leave_stream(stream)
            self._answer(frame(RST_STREAM, 0, stream, struct.pack(">I", REFUSED_STREAM)))
            return
        state = self._streams[stream] = _Stream(self._first_window)
        state.is_ended = is_ended
        if headers is not None:
            is_sound = is_request(headers)
            state.missing = announced_bytes(headers) if is_sound else None
            if not is_sound or (is_ended and state.missing):
                self._break(stream, PROTOCOL_ERROR)
                return
        self._events.append(Opened(stream, headers, is_ended))

    def _on_trailers(self, stream: int, headers: Sequence[Header] | None, is_ended: bool) -> None:
        state = self._streams.get(stream)
        if state is None:
            self._on_late(stream)
            return
        if state.is_ended:
            self._break(stream, STREAM_CLOSED)
            return
        if not is_ended or state.missing or (headers is not None and not are_plain(headers)):
            self._break(stream, PROTOCOL_ERROR)
            return
        state.is_ended = True
        self._events.append(Received(stream, b"", is_ended=True))

    def _on_priority(self, stream: int, payload: bytes) -> None:
        """What is asked for counts for nothing any more (RFC 9113, 5.3.2); how, still does."""
        if stream == 0:
            raise ConnectionFault(PROTOCOL_ERROR, "a priority of no stream")
        if len(payload) != 5:
            raise ConnectionFault(FRAME_SIZE_ERROR, "a frame is not as long as its kind")
        if number_of(payload[:4]) & LARGEST_WINDOW == stream:
            raise ConnectionFault(PROTOCOL_ERROR, "a stream that depends on itself")
        self.guard.useless()

    def _on_reset(self, stream: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(FRAME_SIZE_ERROR, "a frame is not as long as its kind")
        if stream == 0 or stream > self._last_stream:
            raise ConnectionFault(PROTOCOL_ERROR, "what is to be reset was not opened")
        if self._forget(stream):
            self.guard.was_reset()
            self._events.append(WasReset(stream))
        else:
            self.guard.useless()

    def _on_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            raise ConnectionFault(PROTOCOL_ERROR, "settings of a stream")
        if len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionFault(FRAME_SIZE_ERROR, "broken settings")
        if flags & ACK:
            return
        first_window = self._first_window
        for key, value in struct.iter_unpack(">HI", payload):
            # Of what they are about only windows matter: ours are frames of the least size, without a table.
            if key == INITIAL_WINDOW:
                if value > LARGEST_WINDOW:
                    raise ConnectionFault(FLOW_CONTROL_ERROR, "a window is too large")
                first_window = value
            elif (key == ENABLE_PUSH and value > 1) or (
                key == MAX_FRAME and not MAX_FRAME_BYTES <= value <= LARGEST_FRAME
            ):
                raise ConnectionFault(PROTOCOL_ERROR, "a setting out of its bounds")
        # First: until it reads this the peer counts by its old windows.
        self._answer(frame(SETTINGS, ACK, 0, b""))
        if first_window != self._first_window:
            self._resize_windows(first_window)

    def _resize_windows(self, first_window: int) -> None:
        grown, self._first_window = first_window - self._first_window, first_window
        # This costs as much as there are streams, and the peer one small frame.
        self.guard.useless(len(self._streams) // _STREAMS_PER_USELESS)
        for number, state in list(self._streams.items()):
            state.window += grown
            if state.window > LARGEST_WINDOW:
                raise ConnectionFault(FLOW_CONTROL_ERROR, "a window is too large")
            self._go_on(number, state)

    def _on_ping(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            raise ConnectionFault(PROTOCOL_ERROR, "a ping of a stream")
        if len(payload) != 8:
            raise ConnectionFault(FRAME_SIZE_ERROR, "a broken ping")
        if flags & ACK:
            self.guard.useless()
        else:
            self._answer(frame(PING, ACK, 0, payload))

    def _on_window(self, stream: int, more: int) -> None:
        self.guard.useless()  # as many as what is sent is worth are paid for
        if stream == 0:
            self._window += more
            if not more or self._window > LARGEST_WINDOW:
                code = FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR
                raise ConnectionFault(code, "a window grows by nothing, or beyond its bounds")
            self._feed_starved()
            return
        if stream > self._last_stream:
            raise ConnectionFault(PROTOCOL_ERROR, "the window of a stream that was not opened")
        state = self._streams.get(stream)
        if state is None:
            return
        state.window += more
        if not more or state.window > LARGEST_WINDOW:
            self._break(stream, FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR)
            return
        self._go_on(stream, state)

    def _feed_starved(self) -> None:
        while self._starved and self._window > 0:
            stream, _ = self._starved.popitem(last=False)
            self._go_on(stream, self._streams[stream])

    def _go_on(self, stream: int, state: _Stream) -> None:
        """There is more room for what waits in the stream."""
        if state.waiting is not None and self._send_waiting(stream, state):
            self._events.append(Writable(stream))

    def _break(self, stream: int, code: int) -> None:
        """The peer broke a rule of one stream."""
        self._answer(frame(RST_STREAM, 0, stream, struct.pack(">I", code)))
        self._forget(stream)
        self._leave_stream(stream)
        self.guard.was_reset()
        self._events.append(WasReset(stream))

    def _leave_stream(self, stream: int) -> None:
        self._left[stream] = None
        if len(self._left) > _MAX_LEFT:
            oldest = next(iter(self._left))
            del self._left[oldest]
            self._left_before = max(self._left_before, oldest)

    def _answer(self, frame: bytes) -> None:
        self.guard.useless()
        self._num_useless_unsent += 1
        self._unsent.append(frame)

    # What goes.

    def send_headers(self, stream: int, block: bytes) -> None:
        """The answer's first headers; nothing for a stream that is over."""
        if stream in self._streams:
            self._unsent += header_frames(stream, 0, block)

    def send(self, stream: int, data: bytes) -> bool:
        """Send of the body. False: some of it waits for the peer's windows, and `Writable` will say when it is out."""
        state = self._streams.get(stream)
        if state is None:
            return True
        size = len(data)
        if state.waiting is None and size <= state.window and size <= self._window and size <= MAX_FRAME_BYTES:
            state.window -= size
            self._window -= size
            self._unsent.append(FRAME.pack(size << 8, 0, stream))
            self._unsent.append(data)
            return True
        if state.waiting is None:
            state.waiting = bytearray(data)
        else:
            state.waiting += data
        return self._send_waiting(stream, state)

    def refuse(self, stream: int, block: bytes) -> None:
        """As `finish`, of a call that nobody looks at: it counts as asked for nothing. Raises ConnectionFault."""
        before = len(self._unsent)
        self.finish(stream, block)
        self._num_useless_unsent += len(self._unsent) - before
        try:
            self.guard.useless()
        except ConnectionFault as fault:
            self._leave(fault.code)
            raise

    def finish(self, stream: int, block: bytes) -> None:
        """The answer's last headers, behind what waits; the stream is over then. Nothing for one that is."""
        state = self._streams.get(stream)
        if state is None:
            return
        state.trailers = block
        if state.waiting is None:
            self._send_trailers(stream, state)

    def end(self, stream: int, block: bytes) -> None:
        """As `finish`, instead of what waits."""
        state = self._streams.get(stream)
        if state is not None:
            state.waiting, state.trailers = None, block
            self._send_trailers(stream, state)

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._unsent.append(frame(PING, 0, 0, b"baton---"))

    def leave(self) -> None:
        """Take no more streams; those that are open go on."""
        if not self._is_leaving:
            self._leave(NO_ERROR)

    def _leave(self, code: int) -> None:
        self._is_leaving = True
        self._unsent.append(frame(GOAWAY, 0, 0, struct.pack(">II", self._last_stream, code)))

    def _send_waiting(self, stream: int, state: _Stream) -> bool:
        """Whether nothing of the body waits any more."""
        while state.waiting:
            size = min(len(state.waiting), state.window, self._window, MAX_FRAME_BYTES)
            if size <= 0:
                if state.window > 0:
                    self._starved[stream] = None
                return False
            state.window -= size
            self._window -= size
            self._unsent.append(frame(DATA, 0, stream, bytes(state.waiting[:size])))
            del state.waiting[:size]
        state.waiting = None
        if state.trailers is not None:
            self._send_trailers(stream, state)
        return True

    def _send_trailers(self, stream: int, state: _Stream) -> None:
        assert state.trailers is not None
        self._unsent += header_frames(stream, END_STREAM, state.trailers)
        if not state.is_ended:
            # What the peer still wants to say is of no use any more.
            self._unsent.append(frame(RST_STREAM, 0, stream, struct.pack(">I", NO_ERROR)))
            self._leave_stream(stream)
        self.guard.finished()
        self._num_untaken += 1
        self._forget(stream)

    def _forget(self, stream: int) -> bool:
        self._starved.pop(stream, None)
        return self._streams.pop(stream, None) is not None

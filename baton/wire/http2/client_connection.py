"""One HTTP/2 connection at a gRPC client's end (RFC 9113, and gRPC's PROTOCOL-HTTP2.md), without I/O.

The rules are those of the server's end (`baton.wire.http2.server_connection`): a fault against the connection ends it, one
against a call ends that call; what is received goes back to the peer's windows at once; what is sent keeps within the
peer's. Each call ends once, with a status of gRPC, whatever happens to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote

import grpc

from baton.wire.http2.frames import (
    ACK,
    CANCEL,
    COMPRESSION_ERROR,
    DATA,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    INADEQUATE_SECURITY,
    INITIAL_WINDOW,
    LARGEST_WINDOW,
    MAX_FRAME_BYTES,
    MAX_HEADER_LIST,
    NO_ERROR,
    PADDED,
    PING,
    PREFACE,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ConnectionFault,
    FrameReader,
    frame,
    header_frames,
    number_of,
    unpadded,
)
from baton.wire.http2.header_blocks import BrokenHeaders, Header, HeaderReader, write_headers

_MESSAGE = struct.Struct(">BI")
"""Whether it is compressed, and its length."""
_STREAM_WINDOW = 4 << 20
_CONNECTION_WINDOW = 16 << 20
_MAX_HEADER_BYTES = 64 << 10
_MAX_ANSWERS = 1_000
"""That the peer has asked for and not read."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_OF_RESETS = {
    REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    CANCEL: grpc.StatusCode.CANCELLED,
    ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    INADEQUATE_SECURITY: grpc.StatusCode.PERMISSION_DENIED,
}
_OF_HTTP = {
    "400": grpc.StatusCode.INTERNAL,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), grpc.StatusCode.UNAVAILABLE),
}
"""What an answer means that does not come from gRPC (gRPC's http-grpc-status-mapping.md)."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended."""

    code: grpc.StatusCode
    story: str = ""
    trailers: Sequence[Header] = ()

    @property
    def error(self) -> str:
        """What went wrong; empty if nothing did."""
        return "" if self.code is grpc.StatusCode.OK else f"{self.code.name}: {self.story}"


class Answer(Protocol):
    """Who hears of a call, in the midst of what the connection does: must return at once and never raise."""

    def on_messages(self, messages: Sequence[bytes]) -> None: ...

    def on_end(self, ended: Ended) -> None:
        """Called once, and last; not for a call that was cancelled."""
        ...


class _Call:
    """An open one."""

    __slots__ = ("answer", "has_begun", "is_last_sent", "missing", "partial", "to_give_back", "waiting", "window")

    def __init__(self, answer: Answer, window: int) -> None:
        self.answer = answer
        self.window = window
        """Bytes that may be sent."""
        self.to_give_back = 0
        """Bytes that came, of which the peer's window does not know that they were read."""
        self.has_begun = False
        """The answer's first headers were read."""
        self.partial = bytearray()
        """Of a message that is not whole yet."""
        self.missing = 0
        """Bytes that it takes to know more of it: of the message, or of its header."""
        self.waiting: bytearray | None = None
        """What does not fit into the windows yet."""
        self.is_last_sent = False
        """Nothing follows what waits."""


class ClientConnection:
    """A client's end of one connection. Nobody else may change it, and it does nothing by itself."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._headers = HeaderReader(_MAX_HEADER_BYTES)
        self._calls: dict[int, _Call] = {}
        self._next_stream = 1
        self._frames = FrameReader(2 * _MAX_HEADER_BYTES)
        self._window = DEFAULT_WINDOW
        self._first_window = DEFAULT_WINDOW
        """Of each new call."""
        self._to_give_back = 0
        self._num_answers = 0
        self.is_leaving = False
        """It takes no more calls: the peer, or what it did, has ended that."""
        settings = struct.pack(
            ">HIHIHI", ENABLE_PUSH, 0, INITIAL_WINDOW, _STREAM_WINDOW, MAX_HEADER_LIST, _MAX_HEADER_BYTES
        )
        grow = struct.pack(">I", _CONNECTION_WINDOW - DEFAULT_WINDOW)
        self._unsent: list[bytes] = [PREFACE, frame(SETTINGS, 0, 0, settings), frame(WINDOW_UPDATE, 0, 0, grow)]

    @property
    def num_open(self) -> int:
        """Calls that are not over."""
        return len(self._calls)

    def take(self) -> bytes:
        """What is to be sent now; the caller has sent it then."""
        data = b"".join(self._unsent)
        self._unsent.clear()
        self._num_answers = 0
        return data

    # What the caller says.

    def begin(self, headers: bytes, answer: Answer) -> int:
        """Open a call with these headers (see `call_headers`); returns its number. Not on one that is leaving."""
        stream = self._next_stream
        self._next_stream += 2
        self._calls[stream] = _Call(answer, self._first_window)
        self._unsent += header_frames(stream, 0, headers)
        return stream

    def send(self, stream: int, message: bytes, *, is_last: bool = False) -> None:
        """Send a message as soon as the peer's windows take it; nothing for a call that is over."""
        call = self._calls.get(stream)
        if call is None:
            return
        size = _MESSAGE.size + len(message)
        call.is_last_sent = is_last
        if call.waiting is None and size <= call.window and size <= self._window and size <= MAX_FRAME_BYTES:
            call.window -= size
            self._window -= size
            self._unsent.append(FRAME.pack(size << 8 | DATA, END_STREAM if is_last else 0, stream))
            self._unsent.append(_MESSAGE.pack(0, len(message)))
            self._unsent.append(message)
            return
        if call.waiting is None:
            call.waiting = bytearray()
        call.waiting += _MESSAGE.pack(0, len(message))
        call.waiting += message
        self._send_waiting(stream, call)

    def cancel(self, stream: int) -> None:
        """End a call; nothing more is heard of it."""
        if self._calls.pop(stream, None) is not None:
            self._unsent.append(frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))

    def lose(self, story: str) -> None:
        """The connection is gone, and with it every call."""
        self.is_leaving = True
        for stream in list(self._calls):
            self._end(stream, Ended(grpc.StatusCode.UNAVAILABLE, story))

    # What comes.

    def receive(self, data: bytes) -> None:
        """Tell whoever waits what these bytes mean. Raises ConnectionFault, after which only `take` is of use."""
        try:
            for kind, flags, stream, payload in self._frames.read(data):
                self._on_frame(kind, flags, stream, payload)
        except ConnectionFault as fault:
            self._unsent.append(frame(GOAWAY, 0, 0, struct.pack(">II", 0, fault.code)))
            self.lose(f"the peer broke a rule of HTTP/2: {fault}")
            raise

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._on_data(flags, stream, payload)
        elif kind == HEADERS:
            self._on_block(stream, flags, payload)
        elif kind == WINDOW_UPDATE:
            self._on_window(stream, number_of(payload) & LARGEST_WINDOW)
        elif kind == RST_STREAM:
            self._on_reset(stream, number_of(payload))
        elif kind == SETTINGS:
            self._on_settings(flags, stream, payload)
        elif kind == PING:
            self._on_ping(flags, stream, payload)
        elif kind == GOAWAY:
            self._on_leaving(stream, payload)
        elif kind == PUSH_PROMISE:
            raise ConnectionFault(PROTOCOL_ERROR, "what was not allowed is pushed")

    def _check(self, stream: int) -> None:
        if not stream & 1 or stream >= self._next_stream:
            raise ConnectionFault(PROTOCOL_ERROR, "something of a call that was not begun")

    def _on_data(self, flags: int, stream: int, payload: bytes) -> None:
        self._check(stream)
        self._to_give_back += len(payload)
        if self._to_give_back > _CONNECTION_WINDOW // 2:
            self._give_back(0, self._to_give_back)
            self._to_give_back = 0
        call = self._calls.get(stream)
        if call is None:
            return
        if not call.has_begun:
            self._break(stream, PROTOCOL_ERROR, "an answer without headers")
            return
        call.to_give_back += len(payload)
        if call.to_give_back > _STREAM_WINDOW // 2:
            self._give_back(stream, call.to_give_back)
            call.to_give_back = 0
        self._on_body(stream, call, unpadded(payload) if flags & PADDED else payload)
        if flags & END_STREAM:
            self._end(stream, Ended(grpc.StatusCode.INTERNAL, "the answer ended without a status"))

    def _on_body(self, stream: int, call: _Call, data: bytes) -> None:
        if call.partial:
            # Once per message: it may come in a thousand frames.
            call.partial += data
            if len(call.partial) < call.missing:
                return
            data, call.partial = bytes(call.partial), bytearray()
        messages, at, end = [], 0, len(data)
        while end - at >= _MESSAGE.size:
            is_compressed, size = _MESSAGE.unpack_from(data, at)
            if is_compressed or size > self._max_message_bytes:
                self._refuse(stream, size, is_compressed=bool(is_compressed))
                return
            stop = at + _MESSAGE.size + size
            if stop > end:
                break
            messages.append(data[at + _MESSAGE.size : stop])
            at = stop
        if at < end:
            call.partial += data[at:]
            call.missing = stop - at if end - at >= _MESSAGE.size else _MESSAGE.size
        if messages:
            call.answer.on_messages(messages)

    def _refuse(self, stream: int, size: int, *, is_compressed: bool) -> None:
        """A message that can't be taken."""
        if is_compressed:
            ended = Ended(grpc.StatusCode.INTERNAL, "the answer is compressed, which nobody asked for")
        else:
            story = f"Received message larger than max ({size} vs. {self._max_message_bytes})"
            ended = Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, story)
        self._reset(stream, CANCEL, ended)

    def _give_back(self, stream: int, num_bytes: int) -> None:
        self._unsent.append(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", num_bytes)))

    def _on_block(self, stream: int, flags: int, block: bytes) -> None:
        self._check(stream)
        try:
            headers = self._headers.read(block)
        except BrokenHeaders as error:
            raise ConnectionFault(COMPRESSION_ERROR, str(error)) from error
        call = self._calls.get(stream)
        if call is None:
            return
        if headers is None:
            story = f"the answer's headers are larger than {_MAX_HEADER_BYTES} bytes"
            self._reset(stream, CANCEL, Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, story))
            return
        fields = dict(headers)
        if not call.has_begun and (foreign := _not_of_grpc(fields)) is not None:
            self._reset(stream, CANCEL, foreign)
        elif flags & END_STREAM:
            if call.waiting is not None or not call.is_last_sent:
                # What we might still say is of no use any more.
                self._unsent.append(frame(RST_STREAM, 0, stream, struct.pack(">I", NO_ERROR)))
            self._end(stream, _status(fields, headers))
        elif call.has_begun:
            self._break(stream, PROTOCOL_ERROR, "headers in the midst of an answer")
        else:
            # What only announces the answer (1xx) does not begin it.
            call.has_begun = not fields[":status"].startswith("1")

    def _on_window(self, stream: int, more: int) -> None:
        if stream == 0:
            self._window += more
            if not more or self._window > LARGEST_WINDOW:
                code = FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR
                raise ConnectionFault(code, "a window grows by nothing, or beyond its bounds")
            self._go_on()
            return
        self._check(stream)
        call = self._calls.get(stream)
        if call is None:
            return
        call.window += more
        if not more or call.window > LARGEST_WINDOW:
            self._break(stream, FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR, "a window of no size that may be")
        elif call.waiting is not None:
            self._send_waiting(stream, call)

    def _on_reset(self, stream: int, code: int) -> None:
        self._check(stream)
        self._end(stream, Ended(_OF_RESETS.get(code, grpc.StatusCode.INTERNAL), f"the call was reset with {code}"))

    def _on_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream or len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionFault(PROTOCOL_ERROR if stream else FRAME_SIZE_ERROR, "broken settings")
        if flags & ACK:
            return
        first_window = self._first_window
        for key, value in struct.iter_unpack(">HI", payload):
            # Of the others none matters: ours are frames of the least size, without a table.
            if key == INITIAL_WINDOW:
                if value > LARGEST_WINDOW:
                    raise ConnectionFault(FLOW_CONTROL_ERROR, "a window is too large")
                first_window = value
        self._answer(frame(SETTINGS, ACK, 0, b""))
        grown, self._first_window = first_window - self._first_window, first_window
        for call in self._calls.values():
            call.window += grown
            if call.window > LARGEST_WINDOW:
                raise ConnectionFault(FLOW_CONTROL_ERROR, "a window is too large")
        if grown > 0:
            self._go_on()

    def _on_ping(self, flags: int, stream: int, payload: bytes) -> None:
        if stream or len(payload) != 8:
            raise ConnectionFault(PROTOCOL_ERROR if stream else FRAME_SIZE_ERROR, "a broken ping")
        if not flags & ACK:
            self._answer(frame(PING, ACK, 0, payload))

    def _on_leaving(self, stream: int, payload: bytes) -> None:
        """The peer takes no more calls, and will answer none behind the last one it names."""
        if stream or len(payload) < 8:
            raise ConnectionFault(PROTOCOL_ERROR if stream else FRAME_SIZE_ERROR, "a broken farewell")
        self.is_leaving = True
        last, code = struct.unpack_from(">II", payload)
        for stream in [one for one in self._calls if one > last & LARGEST_WINDOW]:
            story = f"the peer is leaving ({code}): {payload[8:200].decode(errors='replace')}"
            self._end(stream, Ended(grpc.StatusCode.UNAVAILABLE, story))

    def _answer(self, data: bytes) -> None:
        self._num_answers += 1
        if self._num_answers > _MAX_ANSWERS:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "it does not read what it asks for")
        self._unsent.append(data)

    # What goes.

    def _go_on(self) -> None:
        """There is more room in the connection's window, or in all calls'."""
        for stream, call in self._calls.items():
            if call.waiting is not None:
                self._send_waiting(stream, call)

    def _send_waiting(self, stream: int, call: _Call) -> None:
        assert call.waiting is not None
        while call.waiting:
            size = min(len(call.waiting), call.window, self._window, MAX_FRAME_BYTES)
            if size <= 0:
                return
            call.window -= size
            self._window -= size
            flags = END_STREAM if call.is_last_sent and size == len(call.waiting) else 0
            self._unsent.append(frame(DATA, flags, stream, bytes(call.waiting[:size])))
            del call.waiting[:size]
        call.waiting = None

    def _break(self, stream: int, code: int, story: str) -> None:
        """The peer broke a rule of one call."""
        self._reset(stream, code, Ended(grpc.StatusCode.INTERNAL, f"the peer broke a rule of HTTP/2: {story}"))

    def _reset(self, stream: int, code: int, ended: Ended) -> None:
        self._unsent.append(frame(RST_STREAM, 0, stream, struct.pack(">I", code)))
        self._end(stream, ended)

    def _end(self, stream: int, ended: Ended) -> None:
        call = self._calls.pop(stream, None)
        if call is not None:
            call.answer.on_end(ended)


def call_headers(method: str, authority: str, metadata: Iterable[Header] = (), *, is_tls: bool = False) -> bytes:
    """What calls of a method (/SERVICE/METHOD) begin with."""
    fields = (
        (":method", "POST"),
        (":scheme", "https" if is_tls else "http"),
        (":path", method),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    )
    return write_headers(fields)


def _not_of_grpc(fields: dict[str, str]) -> Ended | None:
    """What an answer's first headers mean where they don't come from gRPC."""
    status = fields.get(":status", "")
    if status.startswith("1"):
        return None
    if status != "200":
        code = _OF_HTTP.get(status, grpc.StatusCode.UNKNOWN)
        return Ended(code, f"the peer answers as no server of gRPC does: HTTP status {status or 'missing'}")
    if not fields.get("content-type", "").startswith("application/grpc"):
        return Ended(grpc.StatusCode.UNKNOWN, "the peer answers as no server of gRPC does")
    return None


def _status(fields: dict[str, str], trailers: Sequence[Header]) -> Ended:
    number = fields.get("grpc-status", "")
    code = _CODES.get(int(number)) if number.isdecimal() and len(number) < 3 else None
    if code is None:
        return Ended(grpc.StatusCode.UNKNOWN, f"the answer ended with the status {number or 'missing'}", trailers)
    return Ended(code, unquote(fields.get("grpc-message", "")), trailers)

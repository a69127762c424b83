"""The client's end of an HTTP/2 connection for gRPC calls (RFC 9113, gRPC's PROTOCOL-HTTP2.md), without I/O.

It keeps the rules of `baton.wire.http2.connection`. Each call ends exactly once, with a gRPC status, whatever happens
to it; a call that was cancelled reports nothing more.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote

import grpc

from baton.wire.http2.connection import Connection, Stream
from baton.wire.http2.frames import (
    CANCEL,
    ENABLE_PUSH,
    ENHANCE_YOUR_CALM,
    FRAME_SIZE_ERROR,
    INADEQUATE_SECURITY,
    INITIAL_WINDOW,
    LARGEST_WINDOW,
    MAX_HEADER_LIST,
    NO_ERROR,
    PREFACE,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    SETTINGS,
    ConnectionFault,
    frame,
    header_frames,
)
from baton.wire.http2.header_blocks import Header, write_headers

_MESSAGE_PREFIX = struct.Struct(">BI")
"""Before each gRPC message: whether it is compressed, and its length."""
_STREAM_WINDOW = 4 << 20
_MAX_HEADER_BYTES = 64 << 10
_MAX_ANSWERS_UNSENT = 1_000
"""Frames that answer the peer's PING and SETTINGS, and that it does not read."""
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
_STATUS_OF_RESET = {
    REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    CANCEL: grpc.StatusCode.CANCELLED,
    ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    INADEQUATE_SECURITY: grpc.StatusCode.PERMISSION_DENIED,
}
"""The gRPC status of a stream that the peer reset (PROTOCOL-HTTP2.md, "Errors"); any other code is INTERNAL."""
_STATUS_OF_HTTP = {
    "400": grpc.StatusCode.INTERNAL,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), grpc.StatusCode.UNAVAILABLE),
}
"""The gRPC status of an HTTP answer that is not gRPC's (gRPC's http-grpc-status-mapping.md)."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    """How a call ended."""

    code: grpc.StatusCode
    detail: str = ""
    trailers: Sequence[Header] = ()

    @property
    def error(self) -> str:
        """What went wrong; empty for OK."""
        return "" if self.code is grpc.StatusCode.OK else f"{self.code.name}: {self.detail}"


class CallListener(Protocol):
    """Receives the messages and the end of one call. Its methods must return at once and never raise."""

    def on_messages(self, messages: Sequence[bytes]) -> None: ...

    def on_end(self, end: CallEnd) -> None:
        """Called once and last; not for a call that was cancelled."""
        ...


class _Call(Stream):
    """The stream of one open call."""

    __slots__ = ("has_headers", "listener", "num_bytes_needed", "partial_message")

    def __init__(self, listener: CallListener, send_window: int) -> None:
        super().__init__(send_window, _STREAM_WINDOW)
        self.listener = listener
        self.has_headers = False
        """Whether the answer's first headers have come."""
        self.partial_message = bytearray()
        """The beginning of a message whose rest has not come yet."""
        self.num_bytes_needed = 0
        """The length that `partial_message` must have before it is looked at again."""


class ClientConnection(Connection[_Call]):
    """A client's end of one connection."""

    def __init__(self, max_message_bytes: int) -> None:
        """`max_message_bytes`: limit of each message of an answer; a larger one ends its call."""
        settings = struct.pack(
            ">HIHIHI", ENABLE_PUSH, 0, INITIAL_WINDOW, _STREAM_WINDOW, MAX_HEADER_LIST, _MAX_HEADER_BYTES
        )
        super().__init__([PREFACE, frame(SETTINGS, 0, 0, settings)], _STREAM_WINDOW, _MAX_HEADER_BYTES)
        self._max_message_bytes = max_message_bytes
        self._next_stream = 1
        self._num_answers_unsent = 0
        self.is_leaving = False
        """Whether no new call may begin: the peer has sent GOAWAY, or the connection is lost."""

    def take(self) -> bytes:
        """Remove and return the bytes to send now."""
        self._num_answers_unsent = 0
        return super().take()

    # Calling.

    def begin(self, headers: bytes, listener: CallListener) -> int:
        """Begin a call with the header block of `call_headers`; returns its stream's number. Not once `is_leaving`."""
        number = self._next_stream
        self._next_stream += 2
        self._streams[number] = _Call(listener, self._initial_send_window)
        self._unsent += header_frames(number, 0, headers)
        return number

    def send(self, number: int, message: bytes, *, is_last: bool = False) -> None:
        """Send a message as soon as the peer's windows take it; does nothing for a call that is over."""
        call = self._streams.get(number)
        if call is not None:
            call.ends_with_data = is_last
            self._send_data(number, call, _MESSAGE_PREFIX.pack(0, len(message)) + message)

    def cancel(self, number: int) -> None:
        """End a call. Its listener is not called any more."""
        if self._close_stream(number) is not None:
            self._send_reset(number, CANCEL)

    def end_calls(self, detail: str) -> None:
        """End all calls with UNAVAILABLE, since the connection is gone. Idempotent."""
        self.is_leaving = True
        for number in list(self._streams):
            self._end(number, CallEnd(grpc.StatusCode.UNAVAILABLE, detail))

    # Receiving.

    def receive(self, data: bytes) -> None:
        """Parse these bytes and call the listeners. Raises ConnectionFault, after which only `take` may be called."""
        try:
            self._receive_frames(data)
        except ConnectionFault as fault:
            self._send_goaway(0, fault.code)
            self.end_calls(f"the peer broke a rule of HTTP/2: {fault}")
            raise

    def _check_stream(self, number: int) -> None:
        if not number & 1 or number >= self._next_stream:
            raise ConnectionFault(PROTOCOL_ERROR, "a frame names a call that was not begun")

    def _on_headers(self, number: int, headers: Sequence[Header] | None, *, is_last: bool) -> None:
        self._check_stream(number)
        call = self._streams.get(number)
        if call is None:
            return
        if headers is None:
            detail = f"the answer's headers are larger than {_MAX_HEADER_BYTES} bytes"
            self._reset(number, CANCEL, CallEnd(grpc.StatusCode.RESOURCE_EXHAUSTED, detail))
            return
        fields = dict(headers)
        if not call.has_headers and (end := _end_of_foreign_answer(fields)) is not None:
            self._reset(number, CANCEL, end)
        elif is_last:
            if call.unsent is not None or not call.ends_with_data:
                # The rest of the request is of no use any more.
                self._send_reset(number, NO_ERROR)
            self._end(number, _end_by_trailers(fields, headers))
        elif call.has_headers:
            self._break_stream(number, PROTOCOL_ERROR, "a second header block without END_STREAM")
        else:
            # An interim answer (1xx; RFC 9110, 15.2) is followed by the headers proper.
            call.has_headers = not fields[":status"].startswith("1")

    def _on_body(self, number: int, stream: _Call, data: bytes, *, is_last: bool) -> None:
        if not stream.has_headers:
            self._break_stream(number, PROTOCOL_ERROR, "DATA before any headers")
            return
        self._read_messages(number, stream, data)
        if is_last:
            self._end(number, CallEnd(grpc.StatusCode.INTERNAL, "the answer ended without a status"))

    def _read_messages(self, number: int, call: _Call, data: bytes) -> None:
        if call.partial_message:
            call.partial_message += data
            # A message may come in a thousand frames: it is looked at once.
            if len(call.partial_message) < call.num_bytes_needed:
                return
            data, call.partial_message = bytes(call.partial_message), bytearray()
        messages, at, end = [], 0, len(data)
        while end - at >= _MESSAGE_PREFIX.size:
            is_compressed, size = _MESSAGE_PREFIX.unpack_from(data, at)
            if is_compressed or size > self._max_message_bytes:
                self._refuse_message(number, size, is_compressed=bool(is_compressed))
                return
            stop = at + _MESSAGE_PREFIX.size + size
            if stop > end:
                break
            messages.append(data[at + _MESSAGE_PREFIX.size : stop])
            at = stop
        if at < end:
            call.partial_message += data[at:]
            call.num_bytes_needed = stop - at if end - at >= _MESSAGE_PREFIX.size else _MESSAGE_PREFIX.size
        if messages:
            call.listener.on_messages(messages)

    def _refuse_message(self, number: int, size: int, *, is_compressed: bool) -> None:
        if is_compressed:
            end = CallEnd(grpc.StatusCode.INTERNAL, "the answer is compressed, which the call did not permit")
        else:
            detail = f"Received message larger than max ({size} vs. {self._max_message_bytes})"
            end = CallEnd(grpc.StatusCode.RESOURCE_EXHAUSTED, detail)
        self._reset(number, CANCEL, end)

    def _on_reset(self, number: int, code: int) -> None:
        status = _STATUS_OF_RESET.get(code, grpc.StatusCode.INTERNAL)
        self._end(number, CallEnd(status, f"the peer reset the call with HTTP/2 error code {code}"))

    def _on_goaway(self, payload: bytes) -> None:
        """End the calls that the peer has not looked at, and begin no new ones (6.8)."""
        if len(payload) < 8:
            raise ConnectionFault(FRAME_SIZE_ERROR, "a GOAWAY frame is shorter than 8 bytes")
        self.is_leaving = True
        last, code = struct.unpack_from(">II", payload)
        detail = f"the peer is leaving ({code}): {payload[8:200].decode(errors='replace')}"
        for number in [stream for stream in self._streams if stream > last & LARGEST_WINDOW]:
            self._end(number, CallEnd(grpc.StatusCode.UNAVAILABLE, detail))

    def _answer(self, answer: bytes) -> None:
        self._num_answers_unsent += 1
        if self._num_answers_unsent > _MAX_ANSWERS_UNSENT:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "the peer does not read the answers that it asks for")
        self._unsent.append(answer)

    def _break_stream(self, number: int, code: int, detail: str) -> None:
        self._reset(number, code, CallEnd(grpc.StatusCode.INTERNAL, f"the peer broke a rule of HTTP/2: {detail}"))

    def _reset(self, number: int, code: int, end: CallEnd) -> None:
        self._send_reset(number, code)
        self._end(number, end)

    def _end(self, number: int, end: CallEnd) -> None:
        call = self._close_stream(number)
        if call is not None:
            call.listener.on_end(end)


def call_headers(method: str, authority: str, metadata: Iterable[Header] = (), *, is_tls: bool = False) -> bytes:
    """Return the header block of a call of `method` (/SERVICE/METHOD)."""
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


def _end_of_foreign_answer(fields: dict[str, str]) -> CallEnd | None:
    """Return how a call ends whose answer does not come from a gRPC server; None: it does, by its first headers."""
    status = fields.get(":status", "")
    if status.startswith("1"):
        return None
    if status != "200":
        code = _STATUS_OF_HTTP.get(status, grpc.StatusCode.UNKNOWN)
        return CallEnd(code, f"the peer does not answer as a gRPC server: HTTP status {status or 'missing'}")
    if not fields.get("content-type", "").startswith("application/grpc"):
        return CallEnd(grpc.StatusCode.UNKNOWN, "the peer does not answer as a gRPC server: its content-type differs")
    return None


def _end_by_trailers(fields: dict[str, str], trailers: Sequence[Header]) -> CallEnd:
    number = fields.get("grpc-status", "")
    code = _STATUS_CODES.get(int(number)) if number.isdecimal() and len(number) < 3 else None
    if code is None:
        return CallEnd(grpc.StatusCode.UNKNOWN, f"the answer ended with the status {number or 'missing'}", trailers)
    return CallEnd(code, unquote(fields.get("grpc-message", "")), trailers)

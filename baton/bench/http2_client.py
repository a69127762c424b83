"""As little HTTP/2 as a client of gRPC streams needs, so that thousands of streams cost it next to nothing.

Grpcio's own client would need more of a core than the server that is to be measured. What this one leaves out: of the
answer's headers only the last ones are read, windows are as large as they get. See RFC 9113 and gRPC's
PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import unquote

from baton.bench.hpack import BrokenHeaders, read_headers

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_MAX_WINDOW = (1 << 31) - 1
_FIRST_WINDOW = 65_535
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 1, 4, 5
_STATUS_NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
_FRAME_BYTES = 16_384
_MESSAGE_HEADER = 5

OnMessages = Callable[[Sequence[bytes]], None]
OnEnd = Callable[[str], None]
"""Called once: with nothing, or with what broke the stream."""
OnTrailers = Callable[[Mapping[str, str]], None]
"""Called with the answer's last headers, before its end."""


def _ignored(_: Mapping[str, str]) -> None:
    pass


class Http2Connection(asyncio.Protocol):
    """One connection to a gRPC server. Belongs to its event loop."""

    def __init__(self, method: str, authority: str) -> None:
        self._headers = _header_block(method, authority)
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, tuple[OnMessages, OnEnd, OnTrailers]] = {}
        self._partial: dict[int, bytes] = {}
        self._next_stream = 1
        self._received = b""
        self._to_acknowledge = 0
        self._window = _FIRST_WINDOW
        self._unsent: list[bytes] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, host: str, port: int, method: str) -> Http2Connection:
        """Connect; raises OSError."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(method, f"{host}:{port}"), host, port)
        return connection

    def call(self, request: bytes, on_messages: OnMessages, on_end: OnEnd, on_trailers: OnTrailers = _ignored) -> int:
        """Open a stream with this one request message; returns its number."""
        stream = self._next_stream
        self._next_stream += 2
        self._streams[stream] = (on_messages, on_end, on_trailers)
        body = struct.pack(">BI", 0, len(request)) + request
        self._write(_frame(_HEADERS, _END_HEADERS, stream, self._headers))
        pieces = [body[at : at + _FRAME_BYTES] for at in range(0, len(body), _FRAME_BYTES)]
        for piece in pieces:
            self._unsent.append(_frame(_DATA, _END_STREAM if piece is pieces[-1] else 0, stream, piece))
        self._send_within_window()
        return stream

    def cancel(self, stream: int) -> None:
        """End a stream; nothing more is heard of it."""
        if self._streams.pop(stream, None) is not None:
            self._partial.pop(stream, None)
            self._write(_frame(_RST_STREAM, 0, stream, struct.pack(">I", 8)))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = struct.pack(
            ">HIHIHI", _HEADER_TABLE_SIZE, 0, _INITIAL_WINDOW_SIZE, _MAX_WINDOW, _MAX_FRAME_SIZE, _FRAME_BYTES
        )
        grow = struct.pack(">I", _MAX_WINDOW - _FIRST_WINDOW)
        self._write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, grow))

    def connection_lost(self, exc: Exception | None) -> None:
        for _, on_end, _ in list(self._streams.values()):
            on_end(f"the connection is lost: {exc}")
        self._streams.clear()
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        data = self._received + data if self._received else data
        at, end = 0, len(data)
        while end - at >= 9:
            stop = at + 9 + int.from_bytes(data[at : at + 3], "big")
            if stop > end:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            if kind == _DATA:
                self._on_data(stream, data[at + 9 : stop], flags)
            elif kind == _HEADERS and flags & _END_STREAM:
                self._on_trailers(stream, data[at + 9 : stop], flags)
            else:
                self._on_control(kind, flags, stream, data[at + 9 : stop])
            at = stop
        self._received = data[at:]
        self._acknowledge(at)

    def _on_data(self, stream: int, payload: bytes, flags: int) -> None:
        listeners = self._streams.get(stream)
        if listeners is None:
            return
        rest = self._partial.pop(stream, None)
        if rest is not None:
            payload = rest + payload
        messages, at, end = [], 0, len(payload)
        while end - at >= _MESSAGE_HEADER:
            stop = at + _MESSAGE_HEADER + int.from_bytes(payload[at + 1 : at + _MESSAGE_HEADER], "big")
            if stop > end:
                break
            messages.append(payload[at + _MESSAGE_HEADER : stop])
            at = stop
        if at < end:
            self._partial[stream] = payload[at:]
        if messages:
            listeners[0](messages)
        if flags & _END_STREAM:
            self._end(stream, "")

    def _on_trailers(self, stream: int, payload: bytes, flags: int) -> None:
        listeners = self._streams.get(stream)
        if listeners is None:
            return
        if flags & (_PADDED | _PRIORITY):
            payload = _without_padding(payload, flags)
        try:
            headers = read_headers(payload)
        except BrokenHeaders as error:
            self._end(stream, f"the answer's last headers can't be read: {error}")
            return
        listeners[2](headers)
        code = headers.get("grpc-status", "0")
        name = _STATUS_NAMES[int(code)] if code.isdecimal() and int(code) < len(_STATUS_NAMES) else code
        self._end(stream, "" if code == "0" else f"{name}: {unquote(headers.get('grpc-message', ''))}")

    def _on_control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self._write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
            self._send_within_window()
        elif kind == _RST_STREAM:
            self._end(stream, f"the stream was reset with {int.from_bytes(payload, 'big')}")
        elif kind == _GOAWAY:
            self.close()

    def _end(self, stream: int, error: str) -> None:
        listeners = self._streams.pop(stream, None)
        self._partial.pop(stream, None)
        if listeners is not None:
            listeners[1](error)

    def _acknowledge(self, num_bytes: int) -> None:
        """Give the connection's window back, now and then."""
        self._to_acknowledge += num_bytes
        if self._to_acknowledge > _MAX_WINDOW // 4:
            self._write(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._to_acknowledge)))
            self._to_acknowledge = 0

    def _send_within_window(self) -> None:
        while self._unsent and len(self._unsent[0]) - 9 <= self._window:
            frame = self._unsent.pop(0)
            self._window -= len(frame) - 9
            self._write(frame)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _without_padding(payload: bytes, flags: int) -> bytes:
    padding = payload[0] if flags & _PADDED else 0
    begin = (1 if flags & _PADDED else 0) + (5 if flags & _PRIORITY else 0)
    return payload[begin : len(payload) - padding]


def _header_block(method: str, authority: str) -> bytes:
    """HPACK without its tables: every field a literal that is not indexed."""
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
    return b"".join(b"\0" + _literal(name) + _literal(value) for name, value in fields)


def _literal(text: str) -> bytes:
    data = text.encode()
    if len(data) > 126:
        raise ValueError(f"{text[:40]!r} is too long for a header of this client")
    return bytes([len(data)]) + data

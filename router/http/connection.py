"""One client's HTTP/1 connection: uvicorn's protocol on httptools, with every wait and every amount bounded.

The bounds of an unauthenticated client:

- A request's head is bounded in time, size and number of fields; what is not HTTP by RFC 9112 ends the connection.
- A body is parsed only once the application asks for it, so a request that is refused for its head costs no more. Its
  bytes on the wire are bounded, too, since a chunk of one byte takes six.
- All connections share one budget for each turn of the event loop (`baton.wire.turn_budget`).
- After an answer that is sent before the whole request was read, a bounded rest of it is read and dropped, so that the
  answer is not lost to a reset (RFC 9112, 9.6), and then the connection is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import SystemRandom
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from baton.messages.ids import new_request_id
from baton.observe.listener import close_transport
from baton.security.connection_limit import Place
from baton.wire.turn_budget import TurnBudget
from router.http.errors import HttpError, Kind, error_body, error_headers
from router.http.json_body import MAX_BODY_BYTES, MAX_HEADER_BYTES

HEAD_S = 20.0
"""The time for a request's head, from the beginning of the connection or from its first byte on."""
LINGER_S = 1.0
"""How long a connection that was answered early is read and dropped before it is closed."""
READ_BYTES = 16 << 10
"""The bytes that are read of one connection in one turn of the loop."""
STEP_BYTES = 4 << 10
"""The bytes that are parsed at a time: about half a millisecond's work for chunks of one byte."""
MAX_HEAD_BYTES = 2 * MAX_HEADER_BYTES
"""The most bytes of a head while it arrives; `check_headers` then bounds its content exactly."""
MAX_HEADERS = 100
MAX_WIRE_BYTES = 8 * MAX_BODY_BYTES
"""The most bytes of a body with its chunk headers, unless the server takes larger bodies."""
MAX_DROPPED_BYTES = 256 << 10
"""The most bytes that are read and dropped after an early answer."""
_OWS = b" \t"


class _Http10Cycle(RequestResponseCycle):
    """One exchange with a client of HTTP/1.0, which knows no chunks.

    An answer whose length is not known ends where its connection is closed (RFC 9112, 6.1 and 6.3).
    """

    _ends_at_close = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._ends_at_close = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self._ends_at_close:
                self.chunked_encoding = False
        elif message["type"] == "http.response.body" and self._ends_at_close:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """One connection. All connections share `budget` and `read_buffer`."""

    def __init__(
        self,
        head_s: float,
        budget: TurnBudget,
        read_buffer: memoryview,
        place: Place,
        max_wire_bytes: int = MAX_WIRE_BYTES,
        **parts: Any,
    ) -> None:
        """`read_buffer`: bytes are copied out of it before the next read. `max_wire_bytes`: the most bytes of a body
        with its chunk headers. `parts`: uvicorn's arguments.
        """
        super().__init__(**parts)
        self.parser = None  # type: ignore[assignment]  # it refers back here, and a connection that fails in its handshake is never lost
        self._place = place
        self._head_s = head_s
        self._budget = budget
        self._read_buffer = read_buffer
        self._max_wire_bytes = max_wire_bytes
        self._unparsed = b""
        self._is_in_turn = False
        """Whether the budget will call `step`."""
        self._expects_head = True
        self._num_parsed = 0
        """Bytes of this head, or of this body with its chunk headers."""
        self._refusal: HttpError | None = None
        """Why the request that is being parsed is refused."""
        self._head_due: asyncio.TimerHandle | None = None
        self._linger_due: asyncio.TimerHandle | None = None
        self._num_dropped = 0
        self._is_lingering = False
        self._real: asyncio.Transport | None = None

    # --- called by the transport ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = httptools.HttpRequestParser(self)
        # Bytes after a request with `connection: close` do not undo that request; uvicorn sets the same.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._real = transport
        self.transport = closing = _ClosingTransport(self, transport)  # type: ignore[assignment]
        self.flow = _ConnectionFlowControl(self, closing)
        self._head_due = self.loop.call_later(self._head_s, self.transport.close)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_lingering:
            self._drop(nbytes)
            return
        # With TLS some bytes may come although reading is paused.
        self._unparsed += self._read_buffer[:nbytes]
        if not self._is_in_turn and self._may_parse:
            self._is_in_turn = True
            self._budget.step(self)
        self._read_or_pause()

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.release()
        self._stop_head_timer()
        if self._linger_due is not None:
            self._linger_due.cancel()
        self._unset_keepalive_if_required()
        self._unparsed = b""
        super().connection_lost(exc)
        self._drop_references()

    def _drop_references(self) -> None:
        """Drop the references that lead back here.

        A reference cycle stays until the garbage collector finds it, and with TLS it keeps up to half a megabyte of
        bytes that were read and not decrypted.
        """
        assert isinstance(self.transport, _ClosingTransport)
        assert isinstance(self.flow, _ConnectionFlowControl)
        self.transport.drop_references()
        self.flow.drop_references()
        self.pipeline.clear()
        self._real = None

    # --- called by the budget and the flow control ---

    def step(self) -> bool:
        """Parse a small piece of what was read; returns whether there is more that may be parsed."""
        self._is_in_turn = False
        if self._may_parse:
            piece, self._unparsed = self._unparsed[:STEP_BYTES], self._unparsed[STEP_BYTES:]
            self._parse(piece)
        self._is_in_turn = self._may_parse
        if not self._is_in_turn:
            self._read_or_pause()
        return self._is_in_turn

    def flow_changed(self) -> None:
        """The application asks for more, or can't take more."""
        if not self._is_in_turn and self._may_parse:
            self._is_in_turn = True
            self._budget.step_later(self)
        self._read_or_pause()

    @property
    def _may_parse(self) -> bool:
        return (
            bool(self._unparsed)
            and self.parser is not None
            and not self._is_lingering
            and not self.flow.read_paused
            and not self.pipeline
        )

    def _read_or_pause(self) -> None:
        """Pause reading while there are unparsed bytes: later ones wait in the kernel, and then at the client."""
        if self._real is None or self._real.is_closing():
            return
        if self._is_lingering or not (self._unparsed or self.flow.read_paused):
            self._real.resume_reading()
        else:
            self._real.pause_reading()

    # --- called by the parser ---

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._expects_head:
            return  # trailers are not used here, and must not become headers (RFC 9110, 6.5.1)
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(
                431, "headers_too_large", f"there are more than the {MAX_HEADERS} header fields that are taken"
            )
        super().on_header(name, value.rstrip(_OWS))

    def on_headers_complete(self) -> None:
        self._check_head()
        self._stop_head_timer()
        self._place.asked()
        self._expects_head = False
        self._num_parsed = 0
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _Http10Cycle  # uvicorn makes its own, which has not begun to run

    def on_message_complete(self) -> None:
        self._expects_head = True
        self._num_parsed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.response_complete and not self._expects_head:
            # Answered before the whole body has arrived: the rest is dropped, and bounded.
            self.transport.close()
        super().on_response_complete()
        self.flow_changed()

    def _check_head(self) -> None:
        """Refuse heads that the parser accepts, but HTTP/1.1 or this server does not."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._refuse(505, "http_version_not_supported", "this is a server of HTTP/1.1")
        names = [name for name, _ in self.headers]
        # RFC 9112, 3.2
        if (hosts := names.count(b"host")) > 1 or (version == "1.1" and not hosts):
            self._refuse(400, "bad_request", f"there must be one header field host, and there are {hosts}")
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and version == "1.0":
            self._refuse(400, "bad_request", "transfer-encoding is not for HTTP/1.0")
        if codings not in ([], [b"chunked"]):
            self._refuse(501, "not_implemented", "the one transfer-encoding that is taken is chunked")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """End parsing from within a callback of the parser."""
        self._refusal = HttpError(Kind(status, "invalid_request_error", code), message)
        raise self._refusal

    def _stop_head_timer(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    # --- parsing ---

    def _parse(self, piece: bytes) -> None:
        if self._expects_head and self._head_due is None:
            self._head_due = self.loop.call_later(self._head_s, self.transport.close)
        self._unset_keepalive_if_required()
        self._num_parsed += len(piece)
        was_asked = self.cycle
        while piece:
            try:
                self.parser.feed_data(piece)
                break
            except httptools.HttpParserUpgrade as upgrade:
                # No other protocol is served here, and an upgrade is refused by continuing with this one.
                piece = piece[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._answer_refusal(self._refusal or _malformed(error))
                return
        if self._expects_head and self._num_parsed > MAX_HEAD_BYTES:
            message = f"the request's head has more than the {MAX_HEAD_BYTES} bytes that are taken"
            self._answer_refusal(HttpError(Kind(431, "invalid_request_error", "headers_too_large"), message))
        elif not self._expects_head and self._num_parsed > self._max_wire_bytes:
            message = f"the body takes more than {self._max_wire_bytes} bytes in its chunks"
            self._answer_refusal(HttpError(Kind(413, "invalid_request_error", "body_too_large"), message))
        elif self.cycle is not was_asked and not self._expects_head:
            # The application checks the head first.
            self.flow.pause_reading()

    def _answer_refusal(self, error: HttpError) -> None:
        """Answer with an error unless another answer has begun, and close; running exchanges see the client leave."""
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        if is_answering:
            cycle.disconnected = True
            cycle.message_event.set()
        for waiting, _ in self.pipeline:
            waiting.disconnected = True
        self.pipeline.clear()
        if not (is_answering and cycle.response_started):
            body = error_body(error)
            fields = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
                (b"x-request-id", new_request_id(SystemRandom()).encode()),
                *error_headers(error),
            ]
            head = b"".join(b"%b: %b\r\n" % field for field in fields)
            self.transport.write(STATUS_LINE[error.kind.status] + head + b"\r\n" + body)
        self._expects_head = False  # the request was not read to its end
        self.transport.close()

    # --- closing ---

    def close_soon(self) -> None:
        """Close when the client has had time to read the answer, although it is still sending."""
        assert self._real is not None
        if self._real.is_closing() or self._is_lingering:
            return
        self._stop_head_timer()
        if self._expects_head and not self._unparsed:
            close_transport(self._real)
            return
        self._is_lingering = True
        self._unparsed = b""
        if self._real.can_write_eof():
            try:
                self._real.write_eof()
            except OSError:
                # The client has reset the connection, so no one can read an answer.
                self._real.abort()
                return
        self._linger_due = self.loop.call_later(LINGER_S, self._real.close)
        self._read_or_pause()

    def _drop(self, num_bytes: int) -> None:
        assert self._real is not None
        self._num_dropped += num_bytes
        if self._num_dropped > MAX_DROPPED_BYTES:
            self._real.close()


class _ClosingTransport:
    """The transport that uvicorn gets: its `close` lets the connection close when it is time."""

    def __init__(self, connection: Connection, real: asyncio.Transport) -> None:
        self._connection: Connection | None = connection
        self._real: asyncio.Transport | None = real
        self._is_closing = False
        self.write: Callable[[bytes | bytearray | memoryview], None] = real.write
        self.get_extra_info: Callable[..., Any] = real.get_extra_info

    def is_closing(self) -> bool:
        return self._is_closing or self._real is None or self._real.is_closing()

    def close(self) -> None:
        self._is_closing = True
        if self._connection is not None:
            self._connection.close_soon()

    def drop_references(self) -> None:
        """The connection is lost: later writes are dropped, as by any transport."""
        self._connection = self._real = None
        self.write = _drop_write
        self.get_extra_info = _unknown


def _drop_write(_data: bytes | bytearray | memoryview) -> None:
    pass


def _unknown(_name: str, default: Any = None) -> Any:
    return default


class _ConnectionFlowControl(FlowControl):
    """uvicorn's flow control, except that the connection, and not this, pauses the transport."""

    def __init__(self, connection: Connection, transport: _ClosingTransport) -> None:
        super().__init__(transport)  # type: ignore[arg-type]
        self._connection: Connection | None = connection

    def pause_reading(self) -> None:
        self.read_paused = True

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            if self._connection is not None:
                self._connection.flow_changed()

    def drop_references(self) -> None:
        """The connection is lost."""
        self._connection = None


def _malformed(error: httptools.HttpParserError) -> HttpError:
    return HttpError(Kind(400, "invalid_request_error", "bad_request"), f"this is no HTTP/1.1: {error}")

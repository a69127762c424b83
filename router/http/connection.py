"""One client's HTTP/1 connection: uvicorn's protocol on httptools, with every wait and every amount bounded.

What a stranger may cost before anybody knows who it is:

- A request's head has a time, a size and a number of fields; what is no HTTP by RFC 9112 ends the connection.
- A body is taken apart only once the application asks for it, so one that is refused for its head costs nothing; what
  it needs on the wire is bounded, too, since chunks of one byte need six.
- All connections share one budget of each turn of the loop (`baton.wire.turn_budget`).
- Who is answered before everything was read is heard no more: a bounded rest is read and dropped, so that the answer
  is not lost to a reset (RFC 9112, 9.6), then the connection is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from baton.security.connection_limit import Place
from baton.wire.closing import close_transport
from baton.wire.turn_budget import TurnBudget
from router.http.body import MAX_BODY_BYTES, MAX_HEADER_BYTES
from router.http.errors import HttpError, Kind, error_body, error_headers

HEAD_S = 20.0
"""For a request's head, from the connection or from its first byte on."""
LINGER_S = 1.0
"""How long a connection that was answered early is read and dropped before it is closed."""
READ_BYTES = 16 << 10
"""The bytes that are read of one connection in one turn of the loop."""
STEP_BYTES = 4 << 10
"""What is taken apart at a time: in chunks of one byte about half a millisecond's work."""
MAX_HEAD_BYTES = 2 * MAX_HEADER_BYTES
"""Of a head while it comes; what is in it is bounded exactly by `check_headers`."""
MAX_HEADERS = 100
MAX_WIRE_BYTES = 8 * MAX_BODY_BYTES
"""The largest body with the marks of its chunks, in bytes."""
MAX_DROPPED_BYTES = 256 << 10
_OWS = b" \t"


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """One for each connection; what they share comes from `budget` and `read_buffer`."""

    def __init__(self, head_s: float, budget: TurnBudget, read_buffer: memoryview, place: Place, **parts: Any) -> None:
        """`read_buffer`: what is read is copied out of it before anything else is read. `parts` are uvicorn's."""
        super().__init__(**parts)
        self.parser = None  # type: ignore[assignment]  # it refers back here, and a connection that fails in its handshake is never lost
        self._place = place
        self._head_s = head_s
        self._budget = budget
        self._read_buffer = read_buffer
        self._unparsed = b""
        self._is_in_turn = False
        """Whether the budget will let it step."""
        self._expects_head = True
        self._num_parsed = 0
        """Bytes of this head, or of this body with its chunks' marks."""
        self._refusal: HttpError | None = None
        """Why what is being parsed is not taken."""
        self._head_due: asyncio.TimerHandle | None = None
        self._linger_due: asyncio.TimerHandle | None = None
        self._num_dropped = 0
        self._is_lingering = False
        self._real: asyncio.Transport | None = None

    # What the transport says.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = httptools.HttpRequestParser(self)
        # As uvicorn: what follows a request with `connection: close` does not undo that request.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._real = transport
        self.transport = closing = _Closing(self, transport)  # type: ignore[assignment]
        self.flow = _Flow(self, closing)
        self._head_due = self.loop.call_later(self._head_s, self.transport.close)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_lingering:
            self._drop(nbytes)
            return
        # With TLS some may come although reading is paused.
        self._unparsed += self._read_buffer[:nbytes]
        if not self._is_in_turn and self._may_parse:
            self._is_in_turn = True
            self._budget.step(self)
        self._read_or_pause()

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.release()
        self._head_is_there()
        if self._linger_due is not None:
            self._linger_due.cancel()
        self._unset_keepalive_if_required()
        self._unparsed = b""
        super().connection_lost(exc)
        self._let_go()

    def _let_go(self) -> None:
        """End the references that lead back here. A cycle stays until the collector looks at it, and with TLS what was
        read and not decrypted, up to half a megabyte, stays with it.
        """
        assert isinstance(self.transport, _Closing)
        assert isinstance(self.flow, _Flow)
        self.transport.let_go()
        self.flow.let_go()
        self.pipeline.clear()
        self._real = None

    # What the budget and the flow control say.

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
        """The application asks for more, or must not be given any."""
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
        """What is not parsed yet waits here; what comes behind it waits in the kernel, and there at the client."""
        if self._real is None or self._real.is_closing():
            return
        if self._is_lingering or not (self._unparsed or self.flow.read_paused):
            self._real.resume_reading()
        else:
            self._real.pause_reading()

    # What the parser says.

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._expects_head:
            return  # trailers: nobody here wants any, and they must not become headers (RFC 9110, 6.5.1)
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(
                431, "headers_too_large", f"there are more than the {MAX_HEADERS} header fields that are taken"
            )
        super().on_header(name, value.rstrip(_OWS))

    def on_headers_complete(self) -> None:
        self._check_head()
        self._head_is_there()
        self._place.asked()
        self._expects_head = False
        self._num_parsed = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._expects_head = True
        self._num_parsed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.response_complete and not self._expects_head:
            # Answered before its body was here: what comes is nobody's, and bounded.
            self.transport.close()
        super().on_response_complete()
        self.flow_changed()

    def _check_head(self) -> None:
        """What the parser takes and HTTP/1.1 doesn't, or this server can't."""
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

    def _refuse(self, status: int, code: str, story: str) -> None:
        """End parsing, from within it."""
        self._refusal = HttpError(Kind(status, "invalid_request_error", code), story)
        raise self._refusal

    def _head_is_there(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    # Parsing.

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
                # Nothing else is spoken here, and the other protocol must be refused by going on with this one.
                piece = piece[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._answer_refusal(self._refusal or _malformed(error))
                return
        if self._expects_head and self._num_parsed > MAX_HEAD_BYTES:
            story = f"the request's head has more than the {MAX_HEAD_BYTES} bytes that are taken"
            self._answer_refusal(HttpError(Kind(431, "invalid_request_error", "headers_too_large"), story))
        elif not self._expects_head and self._num_parsed > MAX_WIRE_BYTES:
            story = f"the body takes more than {MAX_WIRE_BYTES} bytes in its chunks"
            self._answer_refusal(HttpError(Kind(413, "invalid_request_error", "body_too_large"), story))
        elif self.cycle is not was_asked and not self._expects_head:
            # The application looks at the head first.
            self.flow.pause_reading()

    def _answer_refusal(self, error: HttpError) -> None:
        """Say what is wrong, unless an answer has begun, and close; whoever is answering hears that nobody listens."""
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
                *error_headers(error),
            ]
            head = b"".join(b"%b: %b\r\n" % field for field in fields)
            self.transport.write(STATUS_LINE[error.kind.status] + head + b"\r\n" + body)
        self._expects_head = False  # whatever it was, it has not been read to its end
        self.transport.close()

    # The end.

    def close_soon(self) -> None:
        """Close once the client has had a chance to read the answer although it is still sending."""
        assert self._real is not None
        if self._real.is_closing() or self._is_lingering:
            return
        self._head_is_there()
        if self._expects_head and not self._unparsed:
            close_transport(self._real)
            return
        self._is_lingering = True
        self._unparsed = b""
        if self._real.can_write_eof():
            try:
                self._real.write_eof()
            except OSError:
                # The client has reset the connection, and that was not read yet: nobody is left to read an answer.
                self._real.abort()
                return
        self._linger_due = self.loop.call_later(LINGER_S, self._real.close)
        self._read_or_pause()

    def _drop(self, num_bytes: int) -> None:
        assert self._real is not None
        self._num_dropped += num_bytes
        if self._num_dropped > MAX_DROPPED_BYTES:
            self._real.close()


class _Closing:
    """The transport as uvicorn has it: to close is the connection's business."""

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

    def let_go(self) -> None:
        """The connection is lost: what is written from now on goes nowhere, as with any transport."""
        self._connection = self._real = None
        self.write = _to_nowhere
        self.get_extra_info = _unknown


def _to_nowhere(_data: bytes | bytearray | memoryview) -> None:
    pass


def _unknown(_name: str, default: Any = None) -> Any:
    return default


class _Flow(FlowControl):
    """uvicorn's, but it is the connection that pauses its transport."""

    def __init__(self, connection: Connection, transport: _Closing) -> None:
        super().__init__(transport)  # type: ignore[arg-type]
        self._connection: Connection | None = connection

    def pause_reading(self) -> None:
        self.read_paused = True

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            if self._connection is not None:
                self._connection.flow_changed()

    def let_go(self) -> None:
        """The connection is lost."""
        self._connection = None


def _malformed(error: httptools.HttpParserError) -> HttpError:
    return HttpError(Kind(400, "invalid_request_error", "bad_request"), f"this is no HTTP/1.1: {error}")

"""One client's connection to a gRPC server of our own: an asyncio protocol around `ServerConnection`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import grpc

from baton.errors import BatonError
from baton.observe.listener import close_transport
from baton.security.connection_limit import Place
from baton.wire.http2.call import Call, UnreadBytes
from baton.wire.http2.call_headers import CallHead, CallRefused, trailers_only
from baton.wire.http2.flood_guard import FREE_RESETS, FREE_RESETS_UNAUTHENTICATED
from baton.wire.http2.frames import ConnectionFault
from baton.wire.http2.server_connection import (
    MAX_STREAMS_OPEN,
    DataReceived,
    RequestReceived,
    ServerConnection,
    StreamReset,
    StreamWritable,
)
from baton.wire.status import to_rpc

if TYPE_CHECKING:
    from baton.wire.http2.server import Http2Server

_log = logging.getLogger(__name__)

_SEND_BUFFER_BYTES = 256 << 10
_PIECE_BYTES = 2 << 10
"""Bytes that are parsed between two readings of the clock. As frames of nine bytes they take a millisecond."""
UNAUTHENTICATED_STREAMS = 100
"""Limit of the streams that are open at once on a connection, until one of its calls is authenticated."""
_KEYLESS_MESSAGE_BYTES = 4 << 10

_STOPPED = CallRefused(grpc.StatusCode.UNAVAILABLE, "the connection is being closed")


class ServerLink(asyncio.BufferedProtocol):
    """The server's end of one client's connection.

    There may be thousands of silent connections. Therefore the sets of a connection are dictionaries, which take a
    third of a set's memory while they are empty.
    """

    def __init__(self, server: Http2Server, place: Place) -> None:
        self._server = server
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._connection = ServerConnection(server.max_metadata_bytes, UNAUTHENTICATED_STREAMS)
        self._connection.guard.free_resets = FREE_RESETS_UNAUTHENTICATED
        self._is_authenticated = False
        """Whether one of the connection's calls was authenticated, or the server needs no keys."""
        self._calls: dict[int, Call] = {}
        self._half_open: dict[int, float] = {}
        """Calls that wait for the rest of their single message: the time since when, by stream, the oldest first."""
        self._keyless: dict[int, None] = {}
        """Open calls of methods that need no key, by stream."""
        self._lingering: dict[int, tuple[float, bytes]] = {}
        """Calls that are answered, but whose answer the peer has not read: the time since when, and the last header
        block, by stream."""
        self._unread_requests = UnreadBytes(server.unread_requests)
        self._unparsed, self._unparsed_at = b"", 0
        """Bytes that wait to be parsed, and the index from which on they are not parsed yet."""
        self._is_paused = False
        """Whether reading is paused until those bytes are parsed."""
        self._transport: asyncio.Transport | None = None
        self._will_flush = False
        self._is_full = False
        """Whether the send buffer is full (`pause_writing`)."""
        self._blocked: dict[int, None] = {}
        """Streams that wait for the send buffer, for the peer's windows, or for the next turn of the loop."""
        self._held_back: dict[int, None] = {}
        """The blocked streams that do not wait for the peer's windows."""
        self._num_unsent = 0
        """Bytes of bodies that were sent in this turn of the loop."""
        self._was_heard = True
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_calls(self) -> int:
        """The number of calls that are not over."""
        return len(self._calls)

    @property
    def num_keyless(self) -> int:
        """The number of open calls of methods that need no key."""
        return len(self._keyless)

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(_SEND_BUFFER_BYTES)
        self._server.connections.add(self)
        self._timer = self._loop.call_later(self._server.quiet_s, self._check_liveness)
        self._flush()
        if self._server.is_stopping:
            self.leave()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._was_heard = True
        data = bytes(self._server.read_buffer[:nbytes])
        if self._unparsed:
            # TLS had read them before its reading was paused.
            self._unparsed, self._unparsed_at = self._unparsed[self._unparsed_at :] + data, 0
            return
        self._unparsed = data
        self._server.budget.step(self)
        if self._unparsed and self._transport is not None and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def step(self) -> bool:
        """Parse a piece of what came; True: there is more (`baton.wire.turn_budget.Source`)."""
        at, stop = self._unparsed_at, self._unparsed_at + _PIECE_BYTES
        piece = self._unparsed[at:stop]
        try:
            self._receive(piece)
        except Exception:
            _log.exception("connection of %s failed", self.peer)
            if self._transport is not None:
                self._transport.abort()
        is_gone = self._transport is None or self._transport.is_closing()
        if stop < len(self._unparsed) and not is_gone:
            self._unparsed_at = stop
            return True
        self._unparsed, self._unparsed_at = b"", 0
        if self._is_paused and self._transport is not None and not is_gone:
            self._is_paused = False
            self._transport.resume_reading()
        return False

    def _receive(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return  # TLS may still hold bytes that it had read before
        try:
            for event in self._connection.receive(data):
                if type(event) is RequestReceived:
                    self._open(event)
                elif type(event) is DataReceived:
                    self._on_data(event)
                elif type(event) is StreamReset:
                    self._on_reset(event.stream)
                elif type(event) is StreamWritable:
                    self._on_writable(event.stream)
        except ConnectionFault as fault:
            # As text: a log record that kept the exception would keep its frames, and with them this connection.
            self._server.broken.happened("connection of %s ended: %s", self.peer, str(fault))
            self.close()
            return
        self._schedule()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.release()
        self._server.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None
        self._unparsed, self._unparsed_at = b"", 0
        calls = list(self._calls.values())
        for stream in list(self._calls):
            self._forget(stream)
        self._server.queue.end_calls(self, calls)

    # Called by calls (CallLink).

    def send_headers(self, stream: int, block: bytes) -> None:
        self._connection.send_headers(stream, block)
        self._schedule()

    def send(self, stream: int, data: bytes) -> bool:
        is_out = self._connection.send(stream, data)
        if not self._will_flush:
            self._schedule()
        self._num_unsent += len(data)
        if is_out and not self._is_full and self._num_unsent < _SEND_BUFFER_BYTES:
            return True
        self._blocked[stream] = None
        if is_out:
            self._held_back[stream] = None
        return False

    def has_room(self, stream: int) -> bool:
        return not self._is_full and stream not in self._blocked

    def finish(self, stream: int, block: bytes) -> None:
        self._forget(stream)
        self._connection.finish(stream, block)
        if self._connection.is_open(stream):
            self._lingering[stream] = self._loop.time(), block
        self._schedule()

    def end(self, stream: int, block: bytes) -> None:
        self._forget(stream)
        self._connection.end(stream, block)
        self._schedule()

    @property
    def peer(self) -> str:
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        if not name:
            return "unknown"
        host, port = name[:2]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    @property
    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        certificate = self._transport.get_extra_info("peercert") if self._transport is not None else None
        names = [value.encode() for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"]
        return {"peer_dns": names} if names else {}

    # Called by the server.

    def leave(self) -> None:
        """Take no new calls; those that run go on."""
        self._connection.leave()
        self._flush()

    def close(self) -> None:
        """End every call, and close the connection."""
        for call in list(self._calls.values()):
            call.stop(_STOPPED)
        self._flush()
        if self._transport is not None:
            close_transport(self._transport)

    # Events of the connection.

    def _open(self, opened: RequestReceived) -> None:
        try:
            call, is_keyless = self._admit(opened)
        except CallRefused as refusal:
            self._connection.refuse(opened.stream, trailers_only(refusal))
            return
        self._calls[opened.stream] = call
        if is_keyless:
            self._keyless[opened.stream] = None
            self._server.num_keyless += 1
        if opened.is_ended:
            call.receive(b"", is_ended=True)
        if call.is_ready:
            self._server.queue.add(self, call, is_keyless=is_keyless)
        else:
            self._half_open[opened.stream] = self._loop.time()

    def _admit(self, opened: RequestReceived) -> tuple[Call, bool]:
        """Authenticate a call; return it, and whether its method needs no key. Raises CallRefused."""
        server = self._server
        if opened.headers is None:
            most = server.max_metadata_bytes
            raise CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {most} bytes of metadata")
        head = CallHead.read(opened.headers)
        method = head.details.method
        try:
            caller = server.authenticator.caller(method, head.details.invocation_metadata)
        except BatonError as error:
            raise CallRefused(*to_rpc(error)) from error
        handler = server.handler(head.details)
        if handler is None:
            raise CallRefused(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        is_keyless, max_bytes = server.authenticator.is_open_to_anyone(method), server.max_message_bytes
        if is_keyless:
            server.admit_keyless(self)
            max_bytes = min(max_bytes, _KEYLESS_MESSAGE_BYTES)
        elif not self._is_authenticated:
            self._is_authenticated = True
            self._place.asked()
            self._connection.guard.free_resets = FREE_RESETS
            self._connection.allow_streams(MAX_STREAMS_OPEN)
        call = Call(
            self,
            opened.stream,
            head.with_caller(caller),
            max_bytes,
            takes_stream=handler.request_streaming,
            unread=self._unread_requests,
            stall_s=server.stall_s,
        )
        return call, is_keyless

    def end_keyless(self) -> None:
        """End the newest of its calls that need no key, since the process has too many."""
        self._calls[max(self._keyless)].stop(too_many_keyless())

    def _on_data(self, received: DataReceived) -> None:
        stream = received.stream
        call = self._calls.get(stream)
        if call is None:
            return
        call.receive(received.data, is_ended=received.is_ended)
        server = self._server
        if (
            self._unread_requests.value > server.max_unread_bytes
            or server.unread_requests.value > server.max_unread_bytes_of_all
        ):
            call.refuse(CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, "more requests at once than are read"))
        if call.is_ready and self._half_open.pop(stream, None) is not None:
            server.queue.add(self, call, is_keyless=stream in self._keyless)

    def _on_reset(self, stream: int) -> None:
        call = self._calls.get(stream)
        self._forget(stream)
        if call is not None:
            call.cancel()

    def _on_writable(self, stream: int) -> None:
        """Let a call write on: what waited in its stream is sent."""
        if self._is_full:
            self._held_back[stream] = None
            return
        self._blocked.pop(stream, None)
        self._held_back.pop(stream, None)
        self._lingering.pop(stream, None)
        call = self._calls.get(stream)
        if call is not None:
            call.on_writable()

    def _forget(self, stream: int) -> None:
        self._calls.pop(stream, None)
        self._half_open.pop(stream, None)
        self._lingering.pop(stream, None)
        if stream in self._keyless:
            del self._keyless[stream]
            self._server.num_keyless -= 1
        self._blocked.pop(stream, None)
        self._held_back.pop(stream, None)

    def _schedule(self) -> None:
        """Send at the end of this turn of the event loop, with all that the turn still adds."""
        if not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._will_flush = False
        if self._transport is None or self._is_full:
            return
        if data := self._connection.take():
            self._transport.write(data)
        self._num_unsent = 0
        for stream in list(self._held_back):
            if self._is_full:
                break
            self._on_writable(stream)

    def _check_liveness(self) -> None:
        """Ping a silent peer: one whose machine is gone closes no connection."""
        if self._transport is None:
            return
        if not self._connection.has_greeted:
            self._server.broken.happened("connection of %s ended: no HTTP/2 preface came in time", self.peer)
            self._transport.abort()
            return
        self._end_stalled()
        if self._was_heard or self._unparsed:
            self._was_heard = False
            self._connection.guard.forgive()
            self._timer = self._loop.call_later(self._server.quiet_s, self._check_liveness)
            return
        self._connection.ping()
        self._flush()
        self._timer = self._loop.call_later(self._server.answer_s, self._give_up)

    def _end_stalled(self) -> None:
        """End calls whose request does not come to its end in time, or whose answer is not read in time."""
        now = self._loop.time()
        for stream, since in list(self._half_open.items()):
            if now - since < self._server.request_s:
                break
            detail = f"the request was not sent to its end within {self._server.request_s:g} s"
            self._calls[stream].stop(CallRefused(grpc.StatusCode.DEADLINE_EXCEEDED, detail))
        for stream, (since, block) in list(self._lingering.items()):
            if now - since < self._server.stall_s:
                break
            del self._lingering[stream]
            self._connection.end(stream, block)
        self._schedule()

    def _give_up(self) -> None:
        if self._was_heard or self._unparsed:
            self._check_liveness()
        elif self._transport is not None:
            self._transport.abort()


def too_many_keyless() -> CallRefused:
    """Return the refusal of a call that needs no key, of which there are too many."""
    return CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at once that need no key")

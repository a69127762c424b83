"""The sockets of a gRPC server of our own: connections on this process's event loop, each call a task.

It takes the place of `grpc.aio.Server` for what many clients stream from. There each message that is written costs a
wake-up of gRPC's own thread, one of ours, and the way back: five to ten times what is done here, where all that a turn
of the loop brings for a connection leaves it with one system call.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import grpc

from baton.observe.listener import Listener, listening_socket
from baton.rpc.http2.call import BadCall, Call, CallDetails, trailers_only
from baton.rpc.http2.connection import Connection, Opened, Received, WasReset, Writable
from baton.rpc.http2.frames import ConnectionFault
from baton.security.connection_limit import ConnectionLimit, Place

_log = logging.getLogger(__name__)

_SEND_BUFFER_BYTES = 256 << 10
_READ_BYTES = 32 << 10
"""In one turn of the loop: what a stranger sends may be costly to look at, and others' turns come between."""
_MESSAGES_UNREAD = 4
"""Of the largest size, what one connection may have sent and nobody has read."""
_BEGIN_AT_ONCE = 4
"""Calls that begin in one turn of the loop: when there is too much to do those that run come first."""


_STOPPED = BadCall(grpc.StatusCode.UNAVAILABLE, "the connection is being closed")


class Http2Server(grpc.aio.Server):
    """Serves the handlers of `grpc.aio` servicers behind the same interceptors: coroutines and generators, no threads.

    It takes compressed requests (gzip) and compresses no answers.
    """

    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        tls: ssl.SSLContext | None = None,
        *,
        max_message_bytes: int,
        max_metadata_bytes: int,
        quiet_s: float = 10.0,
        answer_s: float = 5.0,
        limit: ConnectionLimit | None = None,
    ) -> None:
        """A peer that says nothing for `quiet_s` is asked whether it is there; who does not answer within `answer_s` is
        gone. `limit`: of all connections of the process; without one the server has its own.
        """
        self._limit = limit or ConnectionLimit()
        self.max_message_bytes = max_message_bytes
        self.max_metadata_bytes = max_metadata_bytes
        self.max_unread_bytes = _MESSAGES_UNREAD * max_message_bytes
        self.quiet_s = quiet_s
        self.answer_s = answer_s
        self._tls = tls
        self._generic: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._sockets: list[socket.socket] = []
        self._listeners: list[Listener] = []
        self.connections: set[_Link] = set()
        self.read_buffer = memoryview(bytearray(_READ_BYTES))
        """Of all connections: what is read is looked at before anything else is."""
        self._coming: deque[_Link] = deque()
        """Connections with calls that have not begun, in turn."""
        self._calls: set[asyncio.Task[None]] = set()
        self.is_stopping = False
        self._stopped = asyncio.Event()
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        # The first one stands before the others.
        self.find = reduce(lambda inner, one: partial(one.intercept_service, inner), reversed(interceptors), self._look)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler[Any, Any]]) -> None:
        self._generic += generic_rpc_handlers

    def add_insecure_port(self, address: str) -> int:
        """HOST:PORT; port 0 is picked. With TLS if the server was given any. Raises RuntimeError."""
        host, _, port = address.rpartition(":")
        try:
            listener = listening_socket(host.strip("[]"), int(port))
        except OSError as error:
            raise RuntimeError(f"can't listen on {address}: {error}") from error
        self._sockets.append(listener)
        bound: int = listener.getsockname()[1]
        return bound

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        raise NotImplementedError("give the server its TLS context")

    @property
    def num_calls(self) -> int:
        """Those that have begun and not ended."""
        return len(self._calls)

    @property
    def port(self) -> int:
        """Of its first address."""
        port: int = self._sockets[0].getsockname()[1]
        return port

    @property
    def num_open(self) -> int:
        """Calls that have come and are not answered, of all connections; also those that have not begun."""
        return sum(link.num_calls for link in self.connections)

    async def start(self) -> None:
        for one in self._sockets:
            name = f"grpc {one.getsockname()[1]}"
            listener = Listener(name, one, lambda place: _Link(self, place), self._limit, self._tls)
            self._listeners.append(listener)
            listener.start()

    async def stop(self, grace: float | None = None) -> None:
        """Take no new calls, let running ones end within the grace, then cancel them. Idempotent."""
        self.is_stopping = True
        for listener in self._listeners:
            listener.close()
        for one in self._sockets:
            one.close()
        for link in self.connections:
            link.leave()
        await self._calls_end(grace or 0.0)
        for link in list(self.connections):
            link.close()
        if self._calls:
            await asyncio.wait(self._calls)
        self._stopped.set()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109
        try:
            async with asyncio.timeout(timeout):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True

    async def _calls_end(self, grace_s: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + grace_s
        while (self._calls or self._coming) and (left_s := due - loop.time()) > 0:
            if self._calls:
                await asyncio.wait(self._calls, timeout=left_s)
            else:
                await asyncio.sleep(0)  # those that come begin in the next turn

    def begin(self, link: _Link) -> None:
        """Let the link's calls run, when it is its turn."""
        self._coming.append(link)
        if len(self._coming) == 1:
            asyncio.get_running_loop().call_soon(self._begin_some)

    def _begin_some(self) -> None:
        loop = asyncio.get_running_loop()
        num_begun = 0
        while self._coming and num_begun < _BEGIN_AT_ONCE:
            # One of each connection: a crowd of one makes nobody else wait.
            link = self._coming.popleft()
            call = link.coming.popleft()
            if link.coming:
                self._coming.append(link)
            if not call.is_over:
                num_begun += 1
                task = call.task = loop.create_task(call.serve(self.find))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
        if self._coming:
            loop.call_soon(self._begin_some)

    async def _look(self, details: CallDetails) -> Any:
        for generic in self._generic:
            handler = generic.service(details)  # type: ignore[arg-type]
            if handler is not None:
                return handler
        return None


class _Link(asyncio.BufferedProtocol):
    """One client's connection."""

    def __init__(self, server: Http2Server, place: Place) -> None:
        self._server = server
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(server.max_metadata_bytes)
        self._calls: dict[int, Call] = {}
        self.coming: deque[Call] = deque()
        """Those that have not begun."""
        self._num_received = 0
        """At least the bytes of requests that nobody has read yet."""
        self._transport: asyncio.Transport | None = None
        self._will_flush = False
        self._is_full = False
        """The kernel takes nothing more for now."""
        self._blocked: set[int] = set()
        """Streams that wait for that, for the peer's windows, or for the next turn of the loop."""
        self._held_back: set[int] = set()
        """Those of them that do not wait for the peer's windows."""
        self._num_unsent = 0
        """Bytes of bodies of this turn."""
        self._has_spoken = True
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_calls(self) -> int:
        """Calls that are not over."""
        return len(self._calls)

    # What the transport says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(_SEND_BUFFER_BYTES)
        self._server.connections.add(self)
        self._timer = self._loop.call_later(self._server.quiet_s, self._look)
        self._flush()
        if self._server.is_stopping:
            self.leave()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._receive(bytes(self._server.read_buffer[:nbytes]))

    def _receive(self, data: bytes) -> None:
        self._has_spoken = True
        if self._transport is None or self._transport.is_closing():
            return  # TLS still has some of what came before
        try:
            events = self._connection.receive(data)
        except ConnectionFault as fault:
            _log.info("connection of %s ended: %s", self.peer, fault)
            self.close()
            return
        for event in events:
            if type(event) is Opened:
                self._open(event)
            elif type(event) is Received:
                self._on_data(event)
            elif type(event) is WasReset:
                self._on_reset(event.stream)
            elif type(event) is Writable:
                self._on_room(event.stream)
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
        for stream in list(self._calls):
            self._on_reset(stream)

    # What calls say.

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
        self._blocked.add(stream)
        if is_out:
            self._held_back.add(stream)
        return False

    def has_room(self, stream: int) -> bool:
        return not self._is_full and stream not in self._blocked

    def finish(self, stream: int, block: bytes) -> None:
        self._forget(stream)
        self._connection.finish(stream, block)
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
        found = self._transport.get_extra_info("peercert") if self._transport is not None else None
        names = [value.encode() for kind, value in (found or {}).get("subjectAltName", ()) if kind == "DNS"]
        return {"peer_dns": names} if names else {}

    # What the server says.

    def leave(self) -> None:
        """Take no new calls, and end with the last one."""
        self._connection.leave()
        self._flush()

    def close(self) -> None:
        """End at once, with every call."""
        for call in list(self._calls.values()):
            call.stop(_STOPPED)
        self._flush()
        if self._transport is not None:
            self._transport.close()

    # Inside.

    def _open(self, opened: Opened) -> None:
        try:
            if opened.headers is None:
                most = self._server.max_metadata_bytes
                raise BadCall(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {most} bytes of metadata")
            call = Call(self, opened.stream, opened.headers, self._server.max_message_bytes)
        except BadCall as bad:
            self._connection.finish(opened.stream, trailers_only(bad))
            return
        self._calls[opened.stream] = call
        if opened.is_ended:
            call.receive(b"", is_ended=True)
        self.coming.append(call)
        if len(self.coming) == 1:
            self._server.begin(self)

    def _on_data(self, received: Received) -> None:
        call = self._calls.get(received.stream)
        if call is None:
            return
        call.receive(received.data, is_ended=received.is_ended)
        self._num_received += len(received.data)
        if self._num_received > self._server.max_unread_bytes:
            self._num_received = sum(one.num_held for one in self._calls.values())
            if self._num_received > self._server.max_unread_bytes:
                call.refuse(BadCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "more requests at once than are read"))

    def _on_reset(self, stream: int) -> None:
        call = self._calls.get(stream)
        self._forget(stream)
        if call is not None:
            call.cancel()

    def _on_room(self, stream: int) -> None:
        """What waited in it is out; whether there is room for more the next message will find."""
        if self._is_full:
            self._held_back.add(stream)
            return
        self._blocked.discard(stream)
        self._held_back.discard(stream)
        call = self._calls.get(stream)
        if call is not None:
            call.go_on()

    def _forget(self, stream: int) -> None:
        self._calls.pop(stream, None)
        self._blocked.discard(stream)
        self._held_back.discard(stream)

    def _schedule(self) -> None:
        """Send what there is once this turn of the loop is over: what else it brings goes with it."""
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
            self._on_room(stream)

    def _look(self) -> None:
        """Ask a peer that says nothing: one whose machine is gone closes nothing."""
        if self._transport is None:
            return
        if self._has_spoken:
            self._has_spoken = False
            self._timer = self._loop.call_later(self._server.quiet_s, self._look)
            return
        self._connection.ping()
        self._flush()
        self._timer = self._loop.call_later(self._server.answer_s, self._give_up)

    def _give_up(self) -> None:
        if self._has_spoken:
            self._look()
        elif self._transport is not None:
            self._transport.abort()

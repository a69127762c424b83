"""A gRPC client's connection on this process's event loop: one socket.

It takes the place of `grpc.aio.Channel` for the streams between routers and nodes, and for load generators. With
grpc.aio each message wakes gRPC's own thread, then ours, and goes back. Here all messages that one system call brings
are delivered within it, and all that one turn of the event loop sends leaves with one system call.

It neither checks whether a silent peer is alive nor connects again: its user does (`router.node_links`).
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Self

import grpc

from baton.wire.credentials import MAX_MESSAGE_BYTES
from baton.wire.http2.call_headers import CallRefused, metadata_of
from baton.wire.http2.client_connection import CallEnd, CallListener, ClientConnection
from baton.wire.http2.frames import ConnectionFault

_READ_BYTES = 32 << 10
_NEXT_ADDRESS_S = 0.25
_CLOSE_S = 5.0
"""Seconds that a close waits until the peer has taken the unsent bytes, which a stopped process never does."""


class Http2Client(asyncio.BufferedProtocol):
    """The client's end of one connection to a gRPC server. All calls come from one event loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._connection = ClientConnection(MAX_MESSAGE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._read_buffer = memoryview(bytearray(_READ_BYTES))
        self._will_flush = False
        self._is_full = False
        """Whether the send buffer is full (`pause_writing`)."""
        self._is_closing = False
        self.closed: asyncio.Future[None] = loop.create_future()
        """Completed when the connection accepts no more calls."""

    @classmethod
    async def open(
        cls, host: str, port: int, tls: ssl.SSLContext | None = None, server_name: str | None = None
    ) -> Self:
        """Connect; raises OSError. `server_name`: the name that the certificate must have, if not the host."""
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        loop = asyncio.get_running_loop()
        name = (server_name or host) if tls is not None else None
        # The first address of a name may be one where nobody answers.
        _, client = await loop.create_connection(
            cls, host, port, ssl=tls, server_hostname=name, happy_eyeballs_delay=_NEXT_ADDRESS_S
        )
        return client

    @property
    def is_tls(self) -> bool:
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is not None

    def call(self, headers: bytes, listener: CallListener) -> int:
        """Begin a call with the header block of `call_headers`; returns the number of its stream.

        A call on a connection that takes no more calls ends at once.
        """
        if self._connection.is_leaving:
            listener.on_end(CallEnd(grpc.StatusCode.UNAVAILABLE, "the connection is lost"))
            return 0
        stream = self._connection.begin(headers, listener)
        self._schedule()
        return stream

    def send(self, stream: int, message: bytes, *, is_last: bool = False) -> None:
        """Send a message as soon as the peer takes it; does nothing for a call that is over."""
        self._connection.send(stream, message, is_last=is_last)
        self._schedule()

    def cancel(self, stream: int) -> None:
        """End a call. Its listener is not called any more."""
        self._connection.cancel(stream)
        self._schedule()
        if self._connection.is_leaving:
            self._leave()

    def close(self) -> None:
        """End every call, and close the connection once the peer has taken what is unsent, or has not for some seconds.
        Idempotent.
        """
        if self._is_closing or self._transport is None:
            return
        self._is_closing, self._is_full = True, False
        self._flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(_CLOSE_S, self._transport.abort)

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_closing:
            return  # TLS may still hold bytes that it had read before
        try:
            self._connection.receive(bytes(self._read_buffer[:nbytes]))
        except ConnectionFault:
            self.close()
        if self._connection.is_leaving:
            self._leave()
        self._schedule()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._is_closing = True
        self._connection.end_calls("the connection is lost" if exc is None else f"the connection is lost: {exc}")
        self._leave()

    # Inside.

    def _leave(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        if not self._connection.num_open:
            self.close()

    def _schedule(self) -> None:
        """Send at the end of this turn of the event loop, with all that the turn still adds."""
        if not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._will_flush = False
        if self._transport is None or self._is_full or self._transport.is_closing():
            return
        if data := self._connection.take():
            self._transport.write(data)


def rpc_error(end: CallEnd) -> grpc.aio.AioRpcError:
    """Return the error that `grpc.aio` would raise for a call that ended so."""
    code, detail = end.code, end.detail
    try:
        trailing = grpc.aio.Metadata(*metadata_of(end.trailers))
    except CallRefused as bad:
        code, detail, trailing = bad.code, str(bad), grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, detail, detail)

"""A gRPC client's connections on this process's event loop, each of them one socket.

They take the place of `grpc.aio.Channel` for the streams that a router lives from, and for load generators. There each
message costs a wake-up of gRPC's own thread, one of ours, and the way back; here what came with one system call is told
in the call that reads it, and all that a turn of the loop has to say leaves with one.

Nobody here looks whether a silent peer is still there, and nobody connects again: who needs that does it, as
`router.node_links` does.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Self

import grpc

from baton.wire.channel import MAX_MESSAGE_BYTES
from baton.wire.http2.call import BadCall, metadata_of
from baton.wire.http2.client_connection import Answer, ClientConnection, Ended
from baton.wire.http2.frames import ConnectionFault

_READ_BYTES = 32 << 10
_NEXT_ADDRESS_S = 0.25
_CLOSE_S = 5.0
"""A peer that is stopped takes nothing, and its connection would stay for ever."""


class Http2Client(asyncio.BufferedProtocol):
    """One connection to a gRPC server. Belongs to its event loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._connection = ClientConnection(MAX_MESSAGE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._read_buffer = memoryview(bytearray(_READ_BYTES))
        self._will_flush = False
        self._is_full = False
        """The kernel takes nothing more for now."""
        self._is_closing = False
        self.closed: asyncio.Future[None] = loop.create_future()
        """Done once it takes no more calls."""

    @classmethod
    async def open(
        cls, host: str, port: int, tls: ssl.SSLContext | None = None, server_name: str | None = None
    ) -> Self:
        """Connect; raises OSError. `server_name`: whom the certificate must name, if not the host."""
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        loop = asyncio.get_running_loop()
        name = (server_name or host) if tls is not None else None
        # A name's first address may be one where nobody answers.
        _, client = await loop.create_connection(
            cls, host, port, ssl=tls, server_hostname=name, happy_eyeballs_delay=_NEXT_ADDRESS_S
        )
        return client

    @property
    def is_tls(self) -> bool:
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is not None

    def call(self, headers: bytes, answer: Answer) -> int:
        """Begin a call (see `call_headers`); returns its number. On a connection that is closed it ends at once."""
        if self._connection.is_leaving:
            answer.on_end(Ended(grpc.StatusCode.UNAVAILABLE, "the connection is lost"))
            return 0
        stream = self._connection.begin(headers, answer)
        self._schedule()
        return stream

    def send(self, stream: int, message: bytes, *, is_last: bool = False) -> None:
        """Send a message as soon as the peer takes it; nothing for a call that is over."""
        self._connection.send(stream, message, is_last=is_last)
        self._schedule()

    def cancel(self, stream: int) -> None:
        """End a call; nothing more is heard of it."""
        self._connection.cancel(stream)
        self._schedule()
        if self._connection.is_leaving:
            self._leave()

    def close(self) -> None:
        """End every call, and the connection, once what is on its way is out or nobody takes it. Idempotent."""
        if self._is_closing or self._transport is None:
            return
        self._is_closing, self._is_full = True, False
        self._flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(_CLOSE_S, self._transport.abort)

    # What the transport says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_closing:
            return  # TLS still has some of what came before
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
        self._connection.lose("the connection is lost" if exc is None else f"the connection is lost: {exc}")
        self._leave()

    # Inside.

    def _leave(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        if not self._connection.num_open:
            self.close()

    def _schedule(self) -> None:
        """Send what there is once this turn of the loop is over: what else it brings goes with it."""
        if not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._will_flush = False
        if self._transport is None or self._is_full or self._transport.is_closing():
            return
        if data := self._connection.take():
            self._transport.write(data)


def rpc_error(ended: Ended) -> grpc.aio.AioRpcError:
    """What `grpc.aio` would raise for a call that ended so."""
    code, story = ended.code, ended.story
    try:
        trailing = grpc.aio.Metadata(*metadata_of(ended.trailers))
    except BadCall as bad:
        code, story, trailing = bad.code, str(bad), grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, story, story)

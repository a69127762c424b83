"""The decode node's end of one link to one incarnation of a prefill node."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from baton.background import OnFault, current_watch
from baton.errors import TransferCause, TransferFailed
from baton.messages.ids import Peer
from baton.v1 import kv_link_pb2, kv_link_pb2_grpc
from baton.wire.credentials import PLAINTEXT_DIALER
from baton.wire.liveness import IsRunning, is_running
from kv_transfer.layout import MAX_PARTS, LinkIdentity, layout_mismatch
from kv_transfer.link.link import CAUSE_KEY, HANDSHAKE_S, HEARTBEAT_S, LinkStream
from kv_transfer.link.link_codec import read_sender_message, read_welcome, write_hello, write_reader_message
from kv_transfer.link.link_messages import LinkHello, LinkWelcome, ReaderMessage, SenderMessage

_log = logging.getLogger(__name__)
_Call = grpc.aio.StreamStreamCall[kv_link_pb2.OpenRequest, kv_link_pb2.OpenResponse]


class LinkClientHandler(Protocol):
    """The owner of the link. Its methods are called on the event loop, in order."""

    def link_up(self, welcome: LinkWelcome) -> None:
        """The handshake is done, and the link carries messages from now on."""
        ...

    def link_received(self, incarnation: str, message: SenderMessage) -> None:
        """The sender of this incarnation sent a message."""
        ...

    def link_down(self, incarnation: str, error: TransferFailed) -> None:
        """The link could not be opened, or it ended. Called exactly once, unless `close` ended the link."""
        ...


class LinkClient:
    """One link, which is opened at once and never reopened: to open it again, make a new one."""

    def __init__(
        self,
        identity: LinkIdentity,
        source: Peer,
        handler: LinkClientHandler,
        heartbeat_s: float = HEARTBEAT_S,
        handshake_s: float = HANDSHAKE_S,
        make_channel: Callable[[str], grpc.aio.Channel] = PLAINTEXT_DIALER.channel,
        is_running: IsRunning = is_running,
    ) -> None:
        """`is_running` tells whether the sender's process runs; see `LinkStream`."""
        self._identity = identity
        self._source = source
        self._handler = handler
        self._heartbeat_s = heartbeat_s
        self._handshake_s = handshake_s
        self._make_channel = make_channel
        self._is_running = is_running
        self._stream: LinkStream[ReaderMessage, SenderMessage] | None = None
        self._cut_by: TransferFailed | None = None
        self._cause_given: TransferCause | None = None
        """The cause with which the sender ended the link; None if it gave none."""
        self.counters: Counter[str] = Counter()
        """Messages that were skipped, by kind."""
        # The task fails only if `link_down` raises. The transfers on this link would then wait for ever.
        self._task = current_watch.get().start(
            self._run, "link", source.incarnation, on_fault=OnFault.END_PROCESS, may_end=True
        )

    @property
    def source(self) -> Peer:
        """The sender that the link leads to."""
        return self._source

    def send(self, message: ReaderMessage) -> None:
        """Send a message; it is dropped while the link is not up."""
        if self._stream is not None:
            self._stream.send(message)

    def cut(self, error: TransferFailed) -> None:
        """End an open link; `link_down` follows with this error, unless the link has been cut before."""
        if self._stream is not None and self._stream.cut(str(error)):
            self._cut_by = error

    async def close(self) -> None:
        """End the link without calling the handler any more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        channel: grpc.aio.Channel | None = None
        try:
            channel = self._make_channel(self._source.address)
            error = await self._open_and_carry(channel)
        except Exception as fault:
            # Whatever the fault is, the transfers on this link must hear that it is over.
            _log.exception("link to %s failed unexpectedly: its transfers fail", self._source.incarnation)
            error = TransferFailed(TransferCause.PEER_GONE, f"link to {self._source.incarnation}: {fault!r}")
        finally:
            self._stream = None
            if channel is not None:
                await channel.close(None)
        self._handler.link_down(self._source.incarnation, error)

    async def _open_and_carry(self, channel: grpc.aio.Channel) -> TransferFailed:
        """Shake hands and carry messages until the link ends; returns why it did."""
        peer = self._source.incarnation
        call: _Call = kv_link_pb2_grpc.KvLinkStub(channel).Open()
        try:
            welcome = await self._shake_hands(call)
            heartbeat_s = min(self._heartbeat_s, max(0.001, welcome.heartbeat_ms / 1000))
            self._stream = LinkStream(
                read=lambda: self._read(call),
                write=lambda message: call.write(write_reader_message(message)),
                received=lambda message: self._handler.link_received(peer, message),
                heartbeat_s=heartbeat_s,
                is_running=lambda: self._is_running(self._source.address, heartbeat_s),
            )
            self._handler.link_up(welcome)
            reason = await self._stream.run()
            cause = self._cause_given or TransferCause.PEER_GONE
            return self._cut_by or TransferFailed(cause, f"link to {peer}: {reason}")
        except TransferFailed as error:
            return error

    async def _shake_hands(self, call: _Call) -> LinkWelcome:
        """Send our hello and receive the welcome; raises TransferFailed when the sender can't be used."""
        ours, source = self._identity, self._source
        hello = LinkHello(
            ours.protocol,
            ours.cluster,
            ours.node_id,
            ours.incarnation,
            source.incarnation,
            ours.layout,
            ours.address,
        )
        try:
            async with asyncio.timeout(self._handshake_s):
                await call.write(write_hello(hello))
                first = await call.read()
        except TimeoutError:
            detail = f"{source.incarnation} did not answer the hello of this node within {self._handshake_s:g} s"
            raise TransferFailed(TransferCause.PEER_GONE, detail) from None
        except grpc.aio.AioRpcError as error:
            raise _open_failure(error, source) from error
        except asyncio.InvalidStateError as error:
            raise TransferFailed(TransferCause.PEER_GONE, f"{source.incarnation}: {error}") from error
        welcome = read_welcome(first) if isinstance(first, kv_link_pb2.OpenResponse) else None
        if welcome is None or welcome.incarnation != source.incarnation:
            name = welcome.incarnation if welcome else "something that is no prefill node"
            detail = f"{name} answers at {source.address} instead of {source.incarnation}"
            raise TransferFailed(TransferCause.PEER_GONE, detail)
        if len(welcome.other_parts) >= MAX_PARTS:
            detail = f"{source.incarnation} has {len(welcome.other_parts) + 1} memories, not {MAX_PARTS} at most"
            raise TransferFailed(TransferCause.REFUSED, detail)
        mismatch = layout_mismatch(ours.layout, welcome.layout, ours.node_id, source.node_id)
        if mismatch is not None:
            raise TransferFailed(TransferCause.LAYOUT_MISMATCH, mismatch)
        return welcome

    async def _read(self, call: _Call) -> SenderMessage | None:
        while isinstance(response := await self._next_response(call), kv_link_pb2.OpenResponse):
            message = read_sender_message(response)
            if message is not None:
                return message
            self.counters["message_unknown"] += 1
        return None

    async def _next_response(self, call: _Call) -> Any:
        try:
            return await call.read()
        except grpc.aio.AioRpcError as error:
            self._cause_given = _cause_in(error.trailing_metadata())
            raise


def _cause_in(metadata: Any) -> TransferCause | None:
    sent = {value for key, value in metadata or () if key == CAUSE_KEY}
    return next((cause for cause in TransferCause if cause.value in sent), None)


def _open_failure(error: grpc.aio.AioRpcError, source: Peer) -> TransferFailed:
    cause = _cause_in(error.trailing_metadata()) or TransferCause.PEER_GONE
    return TransferFailed(cause, f"{source.node_id} at {source.address}: {error.details()}")

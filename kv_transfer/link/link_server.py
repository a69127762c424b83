"""The prefill node's end of links: the handshake with decode nodes, refusals of those that can't use its blocks, and
messages."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any, Protocol

import grpc

from baton.background import current_watch
from baton.errors import TransferCause
from baton.v1 import kv_link_pb2, kv_link_pb2_grpc
from baton.wire.liveness import IsRunning, is_running
from kv_transfer.layout import LinkIdentity, PeerNode, layout_mismatch
from kv_transfer.link.link import CAUSE_KEY, HANDSHAKE_S, HEARTBEAT_S, LinkStream
from kv_transfer.link.link_codec import read_hello, read_reader_message, write_sender_message, write_welcome
from kv_transfer.link.link_messages import LinkHello, ReaderMessage, SenderMessage, welcome_of

_Context = grpc.aio.ServicerContext[Any, Any]
_NODE_STOPS = "the node stops"
_MAX_ID_CHARS = 128
_MAX_ADDRESS_CHARS = 300
"""What a reader says of itself is kept, so its length is bounded: a host's name has at most 253 characters."""


class LinkServerHandler(Protocol):
    """The owner of the links. Its methods are called on the event loop, in order. Links are numbered."""

    def link_opened(self, link: int, node_id: str, incarnation: str, address: str, block_size: int) -> None:
        """A reader's handshake is done.

        `address`: where its process listens; empty: unknown. `block_size`: tokens in a block of its cache.
        """
        ...

    def link_refused(self, node_id: str, cause: TransferCause, detail: str) -> None:
        """A reader that sent its hello can't be served."""
        ...

    def link_received(self, link: int, message: ReaderMessage) -> None:
        """A reader sent a message on an open link."""
        ...

    def link_closed(self, link: int, reason: str) -> None:
        """The link ended, for whatever reason. Called exactly once after `link_opened`."""
        ...


class LinkServer(kv_link_pb2_grpc.KvLinkServicer):
    """All links of one prefill node. Belongs to the event loop."""

    def __init__(
        self,
        identity: LinkIdentity,
        node: PeerNode,
        handler: LinkServerHandler,
        heartbeat_s: float = HEARTBEAT_S,
        handshake_s: float = HANDSHAKE_S,
        is_running: IsRunning = is_running,
    ) -> None:
        """`node`: this node's memories. `is_running` tells whether a reader's process runs; see `LinkStream`."""
        self._identity = identity
        self._node = node
        self._handler = handler
        self._heartbeat_s = heartbeat_s
        self._handshake_s = handshake_s
        self._is_running = is_running
        self._links: dict[int, LinkStream[SenderMessage, ReaderMessage]] = {}
        self._cut_causes: dict[int, TransferCause] = {}
        """The causes that readers of cut links are told, by link."""
        self._numbers = itertools.count(1)
        self._closed = False
        self._watch = current_watch.get()
        self.counters: Counter[str] = Counter()
        """Links that were refused and messages that were skipped, by kind."""

    @property
    def num_links(self) -> int:
        return len(self._links)

    def add_to_server(self, server: grpc.aio.Server) -> None:
        kv_link_pb2_grpc.add_KvLinkServicer_to_server(self, server)

    def send(self, link: int, message: SenderMessage) -> None:
        """Send a message on a link; it is dropped if the link has ended."""
        stream = self._links.get(link)
        if stream is not None:
            stream.send(message)

    def cut(self, link: int, reason: str, cause: TransferCause | None = None) -> None:
        """End a link; `link_closed` follows with the reason. A link that has ended already is fine.

        `cause`: the reader is told it, beside the reason.
        """
        stream = self._links.get(link)
        if stream is not None and stream.cut(reason) and cause is not None:
            self._cut_causes[link] = cause

    def close(self) -> None:
        """End all links and refuse new ones."""
        self._closed = True
        for link in list(self._links):
            self.cut(link, _NODE_STOPS)

    async def Open(self, request_iterator: Any, context: _Context) -> None:
        try:
            hello = await self._shake_hands(context)
        except grpc.aio.InternalError as error:
            # The reader is gone, so that nothing can be written any more, nor a status.
            raise asyncio.CancelledError("the reader has left before the link was open") from error
        number = next(self._numbers)
        reason = "the stream was cancelled"
        stream: LinkStream[SenderMessage, ReaderMessage] = LinkStream(
            read=lambda: self._read(context),
            write=lambda message: context.write(write_sender_message(message)),
            received=lambda message: self._handler.link_received(number, message),
            heartbeat_s=self._heartbeat_s,
            is_running=lambda: self._is_running(hello.address, self._heartbeat_s),
        )
        self._links[number] = stream
        try:
            self._handler.link_opened(number, hello.node_id, hello.incarnation, hello.address, hello.layout.block_size)
            reason = await stream.run()
        finally:
            # gRPC may cancel this call without an exception here; only `finally` is sure to run.
            del self._links[number]
            cause = self._cut_causes.pop(number, None)
            # If `link_closed` raised unnoticed, leases of this reader would never end.
            self._watch.guarded(lambda: self._handler.link_closed(number, reason), "link-closed")()
        try:
            metadata = ((CAUSE_KEY, cause.value),) if cause is not None else ()
            await context.abort(grpc.StatusCode.UNAVAILABLE, reason, metadata)
        except grpc.aio.InternalError as error:
            # The reader was killed and gRPC had not noticed yet, or gRPC had cancelled this call.
            raise asyncio.CancelledError(reason) from error

    async def _shake_hands(self, context: _Context) -> LinkHello:
        """Receive the hello and send our welcome; aborts the call when the reader can't be served."""
        try:
            async with asyncio.timeout(self._handshake_s):
                first = await context.read()
        except TimeoutError:
            detail = f"the reader sent no hello within {self._handshake_s:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, detail)
        hello = read_hello(first) if isinstance(first, kv_link_pb2.OpenRequest) else None
        if hello is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a link must be a hello")
        refused = self._refusal(hello)
        if refused is not None:
            cause, detail = refused
            self.counters[f"refused_{cause.value}"] += 1
            self._handler.link_refused(hello.node_id[:_MAX_ID_CHARS], cause, detail)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail, ((CAUSE_KEY, cause.value),))
        heartbeat_ms = max(1, int(self._heartbeat_s * 1000))
        await context.write(write_welcome(welcome_of(self._identity, self._node, heartbeat_ms)))
        if self._closed:
            # `close` was called during the handshake, and could not end a link that was not there yet.
            await context.abort(grpc.StatusCode.UNAVAILABLE, _NODE_STOPS)
        return hello

    def _refusal(self, hello: LinkHello) -> tuple[TransferCause, str] | None:
        ours = self._identity
        if self._closed:
            return TransferCause.REFUSED, f"node {ours.node_id} stops"
        # What comes after this repeats the ids.
        for name in ("node_id", "incarnation", "peer_incarnation"):
            if (length := len(getattr(hello, name))) > _MAX_ID_CHARS:
                return TransferCause.REFUSED, f"the hello's {name} has {length} characters, not {_MAX_ID_CHARS} at most"
        if len(hello.address) > _MAX_ADDRESS_CHARS:
            return TransferCause.REFUSED, f"the address of {hello.node_id} is too long: {len(hello.address)} characters"
        if hello.protocol_version != ours.protocol:
            return (
                TransferCause.REFUSED,
                f"versions of the link protocol differ: {ours.node_id} has {ours.protocol}, "
                f"{hello.node_id} has {hello.protocol_version}",
            )
        if hello.cluster != ours.cluster:
            return (
                TransferCause.REFUSED,
                f"clusters differ: {ours.node_id} is in {ours.cluster!r}, "
                f"{hello.node_id} in {hello.cluster[:_MAX_ID_CHARS]!r}",
            )
        if not hello.node_id or not hello.incarnation:
            return TransferCause.REFUSED, "the hello has no node id or no incarnation"
        if hello.peer_incarnation != ours.incarnation:
            return TransferCause.PEER_GONE, f"this is {ours.incarnation}, not {hello.peer_incarnation}"
        mismatch = layout_mismatch(ours.layout, hello.layout, ours.node_id, hello.node_id)
        return None if mismatch is None else (TransferCause.LAYOUT_MISMATCH, mismatch)

    async def _read(self, context: _Context) -> ReaderMessage | None:
        while isinstance(request := await context.read(), kv_link_pb2.OpenRequest):
            message = read_reader_message(request)
            if message is not None:
                return message
            self.counters["message_unknown"] += 1
        return None

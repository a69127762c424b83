"""Clients that only read: thousands of streams in one process that measure the latency of each token."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.bench.micro.relay_nodes import RelayNodes, RelayStream
from baton.errors import BatonError
from baton.messages.generation import GenerateRequest
from baton.wire.codec.generation import request_to_pb, response_from_bytes
from baton.wire.http2.client import Http2Client
from baton.wire.http2.client_connection import CallEnd, call_headers

_GENERATE = "/baton.v1.Generation/Generate"
_CHECKED_EVERY = 64
"""Every 64th stream keeps its text and compares it with the expected one."""
_RETRY_S = 1.0

OnTokens = Callable[[int, int, str], None]
"""Called for a chunk with the index of the first token, the number of tokens, and the text."""
OnEnd = Callable[[str], None]
"""Called once, with an error message, or with an empty one."""


class Front(Protocol):
    """A protocol through which clients reach the router."""

    async def open(self, address: str, connections: int) -> None:
        """Connects to HOST:PORT."""
        ...

    def call(self, request: GenerateRequest, on_tokens: OnTokens, on_end: OnEnd) -> Callable[[], None]:
        """Sends a request; returns a function that cancels it."""
        ...

    def close(self) -> None: ...


class GrpcFront:
    """The gRPC service, over a few connections."""

    def __init__(self) -> None:
        self._connections: list[Http2Client] = []
        self._headers = b""
        self._calls = 0

    async def open(self, address: str, connections: int) -> None:
        host, port = address.rsplit(":", 1)
        self._headers = call_headers(_GENERATE, address)
        self._connections = [await Http2Client.open(host, int(port)) for _ in range(connections)]

    def call(self, request: GenerateRequest, on_tokens: OnTokens, on_end: OnEnd) -> Callable[[], None]:
        self._calls += 1
        connection = self._connections[self._calls % len(self._connections)]
        call = connection.call(self._headers, _Answer(on_tokens, on_end))
        connection.send(call, request_to_pb(request).SerializeToString(), is_last=True)
        return lambda: connection.cancel(call)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class _Answer:
    """Receives the stream of one call."""

    __slots__ = ("_is_finished", "_on_end", "_on_tokens")

    def __init__(self, on_tokens: OnTokens, on_end: OnEnd) -> None:
        self._on_tokens = on_tokens
        self._on_end = on_end
        self._is_finished = False

    def on_messages(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            # The message is not converted: this process does the work of clients and nodes, and must keep up.
            answer = response_from_bytes(message)
            kind = answer.WhichOneof("event")
            if kind == "chunk":
                chunk = answer.chunk
                self._on_tokens(chunk.first_index, len(chunk.token_ids), chunk.text)
            elif kind != "accepted":
                self._is_finished = True

    def on_end(self, end: CallEnd) -> None:
        self._on_end(end.error or ("" if self._is_finished else "the stream ended without an answer"))


class RelayClients:
    """Opens streams and counts what they receive. `reset_counts` starts a measurement."""

    def __init__(self, front: Front, nodes: RelayNodes, prompt: str, decode: Callable[[Sequence[int]], str]) -> None:
        self._front = front
        self._nodes = nodes
        self._prompt = prompt
        self._decode = decode
        self._cancels: dict[str, Callable[[], None]] = {}
        self._opened = 0
        self._changed = asyncio.Event()
        self.max_tokens = 1 << 16
        """Length of the streams that are opened next."""
        self.is_replacing = False
        """Whether another stream is opened when one ends."""
        self.failures: list[str] = []
        self.reset_counts()

    def reset_counts(self) -> None:
        """Sets all counts to zero and drops latencies."""
        self.num_tokens = self.num_messages = self.num_finished = self.num_refused = 0
        self.latencies = array("f")
        """Latency of each token from its step's report to its client, seconds."""

    @property
    def num_open(self) -> int:
        return len(self._cancels)

    def open(self, count: int = 1) -> None:
        """Opens `count` streams."""
        for _ in range(count):
            self._open_one()

    def cancel_all(self) -> None:
        for cancel in list(self._cancels.values()):
            cancel()
        self._cancels.clear()
        self._nodes.forget()

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Waits for a condition; raises BatonError if a stream fails, and TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.raise_failure()
                self._changed.clear()
                await self._changed.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        if self.failures:
            raise BatonError(f"{len(self.failures)} streams failed; the first: {self.failures[0]}")

    def _open_if_replacing(self) -> None:
        if self.is_replacing:
            self._open_one()

    def _open_one(self) -> None:
        self._opened += 1
        name = f"bench-{self._opened}"
        stream = RelayStream(name, self._opened * 7 % len(self._nodes.script), self.max_tokens)
        self._nodes.streams[name] = stream
        kept: list[str] | None = [] if self._opened % _CHECKED_EVERY == 0 else None

        def on_tokens(first_index: int, count: int, text: str) -> None:
            self._read(stream, first_index, count)
            if kept is not None:
                kept.append(text)

        def on_end(error: str) -> None:
            self._on_end(stream, error, None if kept is None else "".join(kept))

        request = GenerateRequest(self._prompt, name, temperature=0.0, max_tokens=stream.max_tokens, ignore_eos=True)
        self._cancels[name] = self._front.call(request, on_tokens, on_end)

    def _read(self, stream: RelayStream, first_index: int, count: int) -> None:
        now = time.monotonic()
        if first_index != stream.num_read and count:
            self.failures.append(f"{stream.request_id}: token {first_index} after {stream.num_read} tokens")
        sent_at = stream.sent_at
        for index in range(first_index, first_index + count):
            self.latencies.append(now - sent_at[index])
        stream.num_read += count
        self.num_tokens += count
        self.num_messages += 1
        self._changed.set()
        node = stream.node
        if node is not None and count:
            node.unread -= count if first_index else count - 1  # the first token is the prefill node's
            if node.on_read is not None:
                node.on_read(node)

    def _on_end(self, stream: RelayStream, error: str, text: str | None) -> None:
        self._cancels.pop(stream.request_id, None)
        self._nodes.streams.pop(stream.request_id, None)
        if error and not stream.num_read:
            # The router refused the request because of overload. It is sent again later, as a client would do.
            self.num_refused += 1
            self._changed.set()
            if self.is_replacing:
                asyncio.get_running_loop().call_later(_RETRY_S, self._open_if_replacing)
            return
        script = self._nodes.script
        if not error and stream.num_read != stream.max_tokens:
            error = f"the stream ended after {stream.num_read} tokens of {stream.max_tokens}"
        if not error and text is not None:
            tokens = [script[(stream.offset + index) % len(script)] for index in range(stream.max_tokens)]
            error = "" if text == self._decode(tokens) else f"the text is not that of its tokens: {text[:80]!r}"
        if error:
            self.failures.append(f"{stream.request_id}: {error}")
        else:
            self.num_finished += 1
        self._changed.set()
        if self.is_replacing:
            self._open_one()


# A minimal client of the OpenAI API that can read thousands of streams, with one connection per request.


class HttpFront:
    """`POST /v1/completions` with `stream`; see `baton.bench.micro.relay_clients.Front`."""

    def __init__(self) -> None:
        self._address = ("", 0)
        self._open: set[_Stream] = set()

    async def open(self, address: str, connections: int) -> None:
        """Sets the address, HOST:PORT. `connections` is ignored, since each request has its own connection."""
        host, port = address.rsplit(":", 1)
        self._address = (host, int(port))

    def call(self, request: GenerateRequest, on_tokens: OnTokens, on_end: OnEnd) -> Callable[[], None]:
        stream = _Stream(request, on_tokens, on_end)
        self._open.add(stream)
        stream.task = asyncio.get_running_loop().create_task(self._connect(stream))
        return stream.cancel

    async def _connect(self, stream: _Stream) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: stream, *self._address)
        except OSError as error:
            stream.end(f"the connection failed: {error}")
        self._open.discard(stream)

    def close(self) -> None:
        """Does nothing: connections end with their requests."""


class _Stream(asyncio.Protocol):
    """Sends one request and parses the server-sent events of its answer."""

    def __init__(self, request: GenerateRequest, on_tokens: OnTokens, on_end: OnEnd) -> None:
        self.task: asyncio.Task[None] | None = None
        self._request = request
        self._on_tokens = on_tokens
        self._on_end: OnEnd | None = on_end
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._num_tokens = 0
        self._id = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._on_end is None:
            transport.abort()
            return
        request = self._request
        fields = {
            "model": "bench",
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "ignore_eos": True,
            "stream": True,
        }
        body = json.dumps(fields).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"x-request-id: {request.request_id}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        # The router ends chunks where events end, so chunk lengths are separate lines, which are skipped.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"id: "):
                self._id = int(line[4:])
            elif line.startswith(b"data: "):
                self._on_event(line[6:].strip())
            elif line.startswith(b"HTTP/1.1 ") and not line.startswith(b"HTTP/1.1 200"):
                self.end(line.decode().strip())

    def _on_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.end("")
            return
        event = json.loads(data)
        if "error" in event:
            self.end(str(event["error"]))
            return
        first, self._num_tokens = self._num_tokens, min(self._id, self._request.max_tokens or self._id)
        text = "".join(choice["text"] for choice in event["choices"])
        if text or self._num_tokens > first:
            self._on_tokens(first, self._num_tokens - first, text)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(f"the connection is lost: {exc}")

    def cancel(self) -> None:
        self._on_end = None
        if self._transport is not None:
            self._transport.abort()

    def end(self, error: str) -> None:
        """Calls `on_end`, once."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            if self._transport is not None:
                self._transport.abort()
            on_end(error)

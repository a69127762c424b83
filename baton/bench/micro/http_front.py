"""A minimal client of the OpenAI API that can read thousands of streams, with one connection per request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from baton.bench.micro.relay_clients import OnEnd, OnTokens
from baton.messages.generation import GenerateRequest


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

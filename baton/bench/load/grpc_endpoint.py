"""Sends requests to a Baton router by gRPC, with as few system calls as possible."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from baton.bench.load.endpoint import UNREACHABLE, Cancel, Listener, Target, Usage
from baton.bench.workloads.workload import WorkloadRequest
from baton.errors import Unreachable
from baton.messages.generation import GenerateRequest
from baton.wire.codec.generation import request_to_pb, response_from_bytes
from baton.wire.http2.client import Http2Client
from baton.wire.http2.client_connection import CallEnd, call_headers

_GENERATE = "/baton.v1.Generation/Generate"
_PUSHBACK = "grpc-retry-pushback-ms"


class GrpcEndpoint:
    """See `baton.bench.load.endpoint.Endpoint`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        host, port = target.address.rsplit(":", 1)
        self._host, self._port = host.strip("[]"), int(port)
        self._tls = target.tls()
        self._headers = call_headers(_GENERATE, target.address, target.key_header.items(), is_tls=self._tls is not None)
        self._connections: list[Http2Client] = []
        self._opening: dict[int, asyncio.Task[Http2Client]] = {}
        """Connections that were lost and are being made again, by number."""
        self._waiting: set[asyncio.Task[None]] = set()
        """Requests that wait for one of these connections."""
        self._sent = 0

    async def open(self) -> None:
        try:
            for _ in range(self._target.connections):
                self._connections.append(await self._connect())
        except OSError as error:
            raise Unreachable(f"{self._target.address} can't be reached: {error.strerror or error}") from None

    def prepare(self, request: WorkloadRequest) -> bytes:
        return self.encode(self._target.request(request))

    def encode(self, request: GenerateRequest) -> bytes:
        """The message that `send` takes, of any request."""
        return request_to_pb(request).SerializeToString()

    def send(self, message: bytes, listener: Listener) -> Cancel:
        answer = _Answer(self._headers, listener)
        self._sent += 1
        number = self._sent % len(self._connections)
        connection = self._connections[number]
        if not connection.closed.done():
            answer.start_call(connection, message)
            return answer.cancel
        task = asyncio.get_running_loop().create_task(self._reconnect_and_send(number, message, answer))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        return answer.cancel

    def close(self) -> None:
        for task in (*self._waiting, *self._opening.values()):
            task.cancel()
        for connection in self._connections:
            connection.close()

    async def _connect(self) -> Http2Client:
        return await Http2Client.open(self._host, self._port, self._tls)

    async def _reconnect_and_send(self, number: int, message: bytes, answer: _Answer) -> None:
        if number not in self._opening:
            self._opening[number] = asyncio.get_running_loop().create_task(self._connect())
        opening = self._opening[number]
        try:
            connection = await asyncio.shield(opening)
        except OSError as error:
            answer.fail(f"{UNREACHABLE}: {self._target.address}: {error.strerror or error}")
            return
        finally:
            if self._opening.get(number) is opening and opening.done():
                del self._opening[number]
        self._connections[number] = connection
        answer.start_call(connection, message)


class _Answer:
    """Receives the stream of one call."""

    __slots__ = ("_call", "_headers", "_is_cancelled", "_listener", "_num_tokens", "_usage")

    def __init__(self, headers: bytes, listener: Listener) -> None:
        self._headers = headers
        self._listener = listener
        self._num_tokens = 0
        self._usage: Usage | None = None
        self._call: tuple[Http2Client, int] | None = None
        self._is_cancelled = False

    def start_call(self, connection: Http2Client, message: bytes) -> None:
        if self._is_cancelled:
            return
        call = connection.call(self._headers, self)
        connection.send(call, message, is_last=True)
        self._call = connection, call

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._call is not None:
            connection, stream = self._call
            connection.cancel(stream)

    def on_messages(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            # Messages are not converted to events: this process must keep up with thousands of streams.
            answer = response_from_bytes(message)
            match answer.WhichOneof("event"):
                case "chunk":
                    chunk = answer.chunk
                    if count := len(chunk.token_ids):
                        if chunk.first_index != self._num_tokens:
                            self.fail(f"a chunk begins at token {chunk.first_index} behind {self._num_tokens} tokens")
                            self.cancel()
                            return
                        self._num_tokens += count
                        self._listener.on_tokens(count, chunk.text)
                case "finished":
                    self._usage = _usage(answer.finished.usage, answer.finished.timings)

    def on_end(self, end: CallEnd) -> None:
        usage, trailers = self._usage, dict(end.trailers)
        if end.error or usage is None:
            pushback = trailers.get(_PUSHBACK, "")
            if pushback.isdecimal():
                self._usage = replace(usage or Usage(), retry_after_s=int(pushback) / 1e3)
            self.fail(end.error or "the stream ended without an answer")
            return
        prefill, decode = (trailers.get(f"baton-{role}-node", "") for role in ("prefill", "decode"))
        self._listener.on_end(None, replace(usage, prefill_node=prefill, decode_node=decode))

    def fail(self, error: str) -> None:
        """Ends the request with this error, unless it was cancelled."""
        if not self._is_cancelled:
            self._listener.on_end(error, self._usage)


def _usage(usage: Any, timings: Any) -> Usage:
    """Converts the final event's usage and timings."""
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        usage.attempts,
        queue_ms=timings.queue_ms,
        prefill_ms=timings.prefill_ms,
    )

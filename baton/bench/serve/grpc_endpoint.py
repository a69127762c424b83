"""A Baton router by gRPC, over as few system calls as possible."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.bench.http2_client import Http2Connection
from baton.bench.serve.endpoint import UNREACHABLE, Listener, Target, Usage
from baton.bench.workloads import WorkloadRequest
from baton.errors import Unreachable
from baton.rpc.codec_generation import event_from_bytes, request_to_pb
from baton.rpc.messages import Accepted, Chunk, GenerateRequest, SequenceFinished

_GENERATE = "/baton.v1.Generation/Generate"


class GrpcEndpoint:
    """See `baton.bench.serve.endpoint.Endpoint`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        host, port = target.address.rsplit(":", 1)
        self._host, self._port = host.strip("[]"), int(port)
        self._connections: list[Http2Connection] = []
        self._opening: dict[int, asyncio.Task[Http2Connection]] = {}
        """Those that were lost and are wanted again, by number."""
        self._waiting: set[asyncio.Task[None]] = set()
        """Requests that wait for one of them."""
        self._sent = 0

    async def open(self) -> None:
        try:
            for _ in range(self._target.connections):
                self._connections.append(await self._connect())
        except OSError as error:
            raise Unreachable(f"{self._target.address} can't be reached: {error.strerror or error}") from None

    def prepare(self, request: WorkloadRequest) -> bytes:
        target = self._target
        return request_to_pb(
            GenerateRequest(
                request.token_ids(target.vocab_size),
                f"{target.request_id_prefix}-{request.index}",
                model=target.model,
                temperature=target.temperature,
                max_tokens=max(1, request.output_length),
                ignore_eos=target.ignore_eos,
            )
        ).SerializeToString()

    def send(self, message: bytes, listener: Listener) -> None:
        self._sent += 1
        number = self._sent % len(self._connections)
        connection = self._connections[number]
        if not connection.closed.done():
            _call(connection, message, listener)
            return
        task = asyncio.get_running_loop().create_task(self._reconnect_and_send(number, message, listener))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def close(self) -> None:
        for task in (*self._waiting, *self._opening.values()):
            task.cancel()
        for connection in self._connections:
            connection.close()

    async def _connect(self) -> Http2Connection:
        return await Http2Connection.open(self._host, self._port, _GENERATE)

    async def _reconnect_and_send(self, number: int, message: bytes, listener: Listener) -> None:
        if number not in self._opening:
            self._opening[number] = asyncio.get_running_loop().create_task(self._connect())
        opening = self._opening[number]
        try:
            connection = await asyncio.shield(opening)
        except OSError as error:
            listener.on_end(f"{UNREACHABLE}: {self._target.address}: {error.strerror or error}", None)
            return
        finally:
            if self._opening.get(number) is opening and opening.done():
                del self._opening[number]
        self._connections[number] = connection
        _call(connection, message, listener)


def _call(connection: Http2Connection, message: bytes, listener: Listener) -> None:
    answer = _Answer(listener)
    if connection.closed.done():
        answer.on_end("the connection is lost: at once")
        return
    connection.call(message, answer.on_messages, answer.on_end, answer.on_trailers)


class _Answer:
    """One stream."""

    __slots__ = ("_listener", "_metadata", "_usage")

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._usage: Usage | None = None
        self._metadata: Mapping[str, str] = {}

    def on_messages(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            event = event_from_bytes(message)
            if isinstance(event, Chunk):
                if event.token_ids:
                    self._listener.on_tokens(len(event.token_ids))
            elif not isinstance(event, Accepted | SequenceFinished):
                self._usage = _usage(event.usage, event.timings)

    def on_trailers(self, headers: Mapping[str, str]) -> None:
        self._metadata = headers

    def on_end(self, error: str) -> None:
        usage = self._usage
        if error or usage is None:
            self._listener.on_end(error or "the stream ended without an answer", usage)
            return
        prefill, decode = (self._metadata.get(f"baton-{role}-node", "") for role in ("prefill", "decode"))
        self._listener.on_end(None, replace(usage, prefill_node=prefill, decode_node=decode))


def _usage(usage: Any, timings: Any) -> Usage:
    """From Protocol Buffers."""
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        usage.attempts,
        queue_ms=timings.queue_ms,
        prefill_ms=timings.prefill_ms,
    )

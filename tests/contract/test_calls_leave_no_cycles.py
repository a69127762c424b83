"""A call of our gRPC server is freed as soon as it ends: with the garbage collector off, no call is left."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from baton.errors import InvalidRequest
from baton.wire.http2.call import Call
from baton.wire.http2.frames import PREFACE
from baton.wire.http2.header_blocks import write_headers
from baton.wire.http2.server import Http2Server
from baton.wire.server.fault_barrier import FaultBarrier
from tests.support.http2_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    SETTINGS,
    frame,
    request_fields,
)
from tests.support.uncollected import garbage_collector_off

NUM_CALLS = 20
LIMIT = 1 << 20
MESSAGE = bytes(5)
WATCH = "/grpc.health.v1.Health/Watch"
CHECK = "/grpc.health.v1.Health/Check"
GENERATE = "/baton.v1.Generation/Generate"
UNARY = "/baton.v1.Generation/Tokenize"
CHAT = "/baton.v1.Generation/Chat"


class Service:
    """Has the name of the public service, so that all its access checks apply."""

    async def generate(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await self._obey(request)

    async def tokenize(self, request: bytes, context: Any) -> bytes:
        await self._obey(request)
        return b"answer"

    async def chat(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request
            await self._obey(request)

    async def _obey(self, request: bytes) -> None:
        if request == b"wait":
            await asyncio.get_running_loop().create_future()
        elif request == b"refuse":
            raise InvalidRequest("request", "is refused")
        elif request == b"break":
            raise RuntimeError("a fault of our own")

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        methods = {
            "Generate": grpc.unary_stream_rpc_method_handler(self.generate, bytes, bytes),
            "Tokenize": grpc.unary_unary_rpc_method_handler(self.tokenize, bytes, bytes),
            "Chat": grpc.stream_stream_rpc_method_handler(self.chat, bytes, bytes),
        }
        return grpc.method_handlers_generic_handler("baton.v1.Generation", methods)


@asynccontextmanager
async def serving() -> AsyncIterator[Http2Server]:
    server = Http2Server((FaultBarrier(),), max_message_bytes=LIMIT, max_metadata_bytes=8192)
    server.add_insecure_port("127.0.0.1:0")
    server.add_generic_rpc_handlers((Service().handler(),))
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)  # type: ignore[attr-defined]
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


@pytest.fixture(autouse=True)
def no_records() -> Iterator[None]:
    """Drop log records: pytest keeps them, and with them exceptions and their frames."""
    log = logging.getLogger("baton.wire.server.fault_barrier")
    log.addFilter(_dropped)
    try:
        yield
    finally:
        log.removeFilter(_dropped)


def _dropped(_record: logging.LogRecord) -> bool:
    return False


@pytest.fixture(autouse=True)
def count_uncollected() -> Iterator[Callable[[], Counter[str]]]:
    """Counts the calls that have not been freed."""
    with garbage_collector_off(Call) as count_uncollected:
        yield count_uncollected


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


@dataclass(frozen=True)
class Way:
    """How the calls of a method end."""

    name: str
    path: str
    body: bytes
    """Empty: the request stays half open."""
    timeout: str = ""
    end: str = ""
    """What ends the calls once they run: nothing, `reset` or `leave` by the client, or `stop` by the server."""


WAYS = [
    Way("a stream finishes", GENERATE, message(b"")),
    Way("a unary call finishes", UNARY, message(b"")),
    Way("a check finishes", CHECK, MESSAGE),
    Way("a stream of requests finishes", CHAT, message(b"") * 3),
    *(
        Way(f"{what} {how}", path, message(how.encode()))
        for what, path in (("a stream", GENERATE), ("a unary call", UNARY), ("a stream of requests", CHAT))
        for how in ("refuse", "break")
    ),
    *(
        Way(f"{what} is ended by a {end}", path, body, end=end)
        for what, path, body in (
            ("a stream", GENERATE, message(b"wait")),
            ("a unary call", UNARY, message(b"wait")),
            ("a stream of requests", CHAT, message(b"wait")),
            ("a watch", WATCH, MESSAGE),
            ("a half-open stream", GENERATE, b""),
            ("a half-open unary call", UNARY, b""),
            ("a half-open stream of requests", CHAT, b""),
            ("a half-open watch", WATCH, b""),
        )
        for end in ("reset", "leave", "stop")
    ),
    *(
        Way(f"{what} is late", path, body, timeout="20m")
        for what, path, body in (
            ("a stream", GENERATE, message(b"wait")),
            ("a unary call", UNARY, message(b"wait")),
            ("a watch", WATCH, MESSAGE),
            ("a half-open unary call", UNARY, b""),
        )
    ),
    Way("a message is too large", UNARY, struct.pack(">BI", 0, LIMIT + 1)),
    Way("a message is cut off", UNARY, struct.pack(">BI", 0, 100) + b"x"),
    Way("a second message comes", UNARY, message(b"") * 2),
    Way("a message of a stream is too large", CHAT, message(b"") + struct.pack(">BI", 0, LIMIT + 1)),
    Way("a method is not there", "/t.T/Nothing", message(b"")),
]


async def wait_until(condition: Callable[[], bool]) -> None:
    """Poll wait_until the condition holds: the server has no event for it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
async def test_a_finished_call_is_freed_without_the_garbage_collector(
    way: Way, count_uncollected: Callable[[], Counter[str]]
) -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        fields = [*request_fields(way.path), *((("grpc-timeout", way.timeout),) if way.timeout else ())]
        frames = [PREFACE, frame(SETTINGS, 0, 0)]
        for stream in range(1, 2 * NUM_CALLS, 2):
            frames.append(frame(HEADERS, END_HEADERS, stream, write_headers(fields)))
            if way.body:
                frames.append(frame(DATA, END_STREAM, stream, way.body))
        writer.write(b"".join(frames))
        if way.end:
            await wait_until(lambda: server.num_open == NUM_CALLS)
            for _ in range(50):
                await asyncio.sleep(0)  # those that run have come to where they wait
        if way.end == "reset":
            writer.write(b"".join(frame(RST_STREAM, 0, s, bytes(4)) for s in range(1, 2 * NUM_CALLS, 2)))
        elif way.end == "leave":
            writer.transport.abort()
        elif way.end == "stop":
            await server.stop(0)
        else:
            received = b""
            while received.count(b"grpc-status") < NUM_CALLS:
                received += await reader.read(1 << 16)
        await wait_until(lambda: server.num_open == 0 and server.num_calls == 0)
        writer.close()
        for _ in range(10):
            await asyncio.sleep(0)  # what the loop itself still holds
        assert count_uncollected() == Counter()

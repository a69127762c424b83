"""Our gRPC server with grpcio's clients: behaviour that the tests of services (`test_wire`) do not cover."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import ConfigError
from baton.wire.http2.frames import PREFACE
from baton.wire.http2.server import Http2Server
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.server.server import RpcServer, streaming_server
from tests.support.http2_frames import HEADERS, PING, SETTINGS, frame, request_block

LIMIT = 1 << 20
Context = grpc.aio.ServicerContext[Any, Any]
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


class Service:
    """A service whose messages are plain bytes."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.begun = asyncio.Event()
        self.started = self.written = 0
        self.metadata: dict[str, str | bytes] = {}

    async def echo(self, request: bytes, context: Context) -> bytes:
        self.begun.set()
        self.metadata = dict(context.invocation_metadata() or ())
        context.set_trailing_metadata((("sent", "back"), ("blob-bin", b"\0\xff")))
        return request

    async def wait(self, request: bytes, context: Context) -> bytes:
        self.started += 1
        self.begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return b"in time"

    async def flood(self, request: bytes, context: Context) -> None:
        try:
            while True:
                await context.write(bytes(10_000))
                self.written += 10_000
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def count(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        async for request in requests:
            yield str(len(request)).encode()

    async def broken(self, request: bytes, context: Context) -> bytes:
        raise RuntimeError("of no service of ours")

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        methods = {
            "Echo": grpc.unary_unary_rpc_method_handler(self.echo),
            "Wait": grpc.unary_unary_rpc_method_handler(self.wait),
            "Flood": grpc.unary_stream_rpc_method_handler(self.flood),
            "Count": grpc.stream_stream_rpc_method_handler(self.count),
            "Broken": grpc.unary_unary_rpc_method_handler(self.broken),
        }
        return grpc.method_handlers_generic_handler("t.T", methods)


@asynccontextmanager
async def serving(service: Service, *, quiet_s: float = 10.0) -> AsyncIterator[tuple[Http2Server, grpc.aio.Channel]]:
    server = Http2Server(max_message_bytes=LIMIT, max_metadata_bytes=8192, quiet_s=quiet_s, answer_s=quiet_s)
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_generic_rpc_handlers((service.handler(),))
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield server, channel
    finally:
        await server.stop(0)


def call(channel: grpc.aio.Channel, method: str, request: bytes = b"", **options: Any) -> Any:
    return channel.unary_unary(f"/t.T/{method}", None, None)(request, **options)


async def code_of(answer: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return caught.value.code()


async def read_to_end(stream: Any) -> None:
    while await stream.read() is not EOF:
        pass


async def unread_flood(channel: grpc.aio.Channel) -> Any:
    """Return a stream that is not read further and whose window the server has had time to fill."""
    flood = channel.unary_stream("/t.T/Flood", None, None)(b"")
    await flood.read()
    for _ in range(300):
        await call(channel, "Echo")
    return flood


async def test_messages_of_all_sizes_and_metadata_arrive() -> None:
    service = Service()
    async with serving(service) as (_, channel):
        for size in (0, 1, 16_384, 65_536, LIMIT):
            echo = call(channel, "Echo", bytes(size), metadata=(("note", "x"), ("raw_connection-bin", b"\x01\xfe")))
            assert len(await echo) == size
        assert (service.metadata["note"], service.metadata["raw_connection-bin"]) == ("x", b"\x01\xfe")
        trailing = dict(await echo.trailing_metadata())
        assert (trailing["sent"], trailing["blob-bin"]) == ("back", b"\0\xff")


async def test_messages_are_bounded_compressed_ones_too() -> None:
    async with serving(Service()) as (_, channel):
        assert await code_of(call(channel, "Echo", bytes(LIMIT + 1))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        squeezed = call(channel, "Echo", bytes(LIMIT), compression=grpc.Compression.Gzip)
        assert len(await squeezed) == LIMIT
        bomb = call(channel, "Echo", bytes(LIMIT + 1), compression=grpc.Compression.Gzip)
        assert await code_of(bomb) is grpc.StatusCode.RESOURCE_EXHAUSTED
        deflated = call(channel, "Echo", bytes(9_000), compression=grpc.Compression.Deflate)
        assert await code_of(deflated) is grpc.StatusCode.UNIMPLEMENTED
        assert await call(channel, "Echo", b"still here") == b"still here"


async def test_streams_of_requests_are_answered_one_by_one() -> None:
    async with serving(Service()) as (_, channel):
        stream = channel.stream_stream("/t.T/Count", None, None)(None)
        for size in (3, 70_000, 0):
            await stream.write(bytes(size))
            assert await stream.read() == str(size).encode()
        await stream.done_writing()
        assert await stream.read() is EOF


async def test_unknown_methods_and_failing_handlers_have_their_status() -> None:
    async with serving(Service()) as (_, channel):
        assert await code_of(call(channel, "Nothing")) is grpc.StatusCode.UNIMPLEMENTED
        assert await code_of(call(channel, "Broken")) is grpc.StatusCode.UNKNOWN


async def test_a_deadline_ends_the_call_at_the_server_too() -> None:
    service = Service()
    async with serving(service) as (_, channel):
        await call(channel, "Echo")
        service.begun.clear()
        waiting = call(channel, "Wait", timeout=1.0)
        await service.begun.wait()
        assert await code_of(waiting) is grpc.StatusCode.DEADLINE_EXCEEDED
        await service.cancelled.wait()


@pytest.mark.parametrize("how", ["the call", "the connection"])
async def test_a_cancelled_call_or_closed_connection_cancels_the_handler(how: str) -> None:
    service = Service()
    async with serving(service) as (_, channel):
        flood = channel.unary_stream("/t.T/Flood", None, None)(b"")
        await flood.read()
        if how == "the call":
            flood.cancel()
        else:
            await channel.close(None)
        await service.cancelled.wait()


async def test_a_stopping_server_lets_calls_end_within_the_grace() -> None:
    service = Service()
    async with serving(service) as (server, channel):
        running = asyncio.ensure_future(call(channel, "Wait"))
        await call(channel, "Echo")
        stopping = asyncio.create_task(server.stop(30.0))
        await asyncio.sleep(0)
        assert await code_of(call(channel, "Echo")) is grpc.StatusCode.UNAVAILABLE
        service.may_end.set()
        assert await running == b"in time"
        await stopping


async def test_a_stopping_server_cancels_calls_that_do_not_end() -> None:
    service = Service()
    async with serving(service) as (server, channel):
        running = call(channel, "Wait")
        await call(channel, "Echo")
        await server.stop(0)
        assert await code_of(running) is grpc.StatusCode.UNAVAILABLE, "so clients try another router"
        assert service.cancelled.is_set()


async def test_a_client_that_reads_nothing_learns_that_the_server_stopped() -> None:
    service = Service()
    async with serving(service) as (server, channel):
        flood = await unread_flood(channel)
        await server.stop(0)
        assert service.cancelled.is_set()
        assert await code_of(read_to_end(flood)) is grpc.StatusCode.UNAVAILABLE


@asynccontextmanager
async def raw_connection(server: Http2Server, channel: grpc.aio.Channel) -> AsyncIterator[socket.socket]:
    """Yield a socket for hand-made frames; the preface is sent and the windows are as large as possible."""
    port = server.port
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        windows = struct.pack(">HI", 4, (1 << 31) - 1)
        increment = frame(8, 0, 0, struct.pack(">I", (1 << 31) - 1 - 65_535))
        await loop.sock_sendall(connection, PREFACE + frame(SETTINGS, 0, 0, windows) + increment)
        yield connection


async def test_a_writer_waits_for_a_client_that_reads_nothing_even_with_the_largest_windows() -> None:
    """HTTP/2 sets no bound then; the kernel does, and the writer must wait."""
    service = Service()
    async with serving(service) as (server, channel), raw_connection(server, channel) as connection:
        loop = asyncio.get_running_loop()
        request = frame(HEADERS, 4, 1, request_block("/t.T/Flood")) + frame(0, 1, 1, bytes(5))
        await loop.sock_sendall(connection, request)
        while service.written < 1_000_000:
            assert await call(channel, "Echo", b"meanwhile") == b"meanwhile"
        before = -1
        while before < service.written:
            before = service.written
            for _ in range(20):
                await call(channel, "Echo")
        assert before < 64 << 20
        connection.close()
        await service.cancelled.wait()


async def test_an_unread_stream_is_sent_no_more_than_its_window() -> None:
    service = Service()
    async with serving(service) as (_, channel):
        flood = await unread_flood(channel)
        bound = service.written
        for _ in range(300):
            await call(channel, "Echo")
        assert service.written == bound, "the connection's other streams do not make it go on"
        flood.cancel()


async def test_simultaneous_calls_begin_a_few_per_turn_of_the_loop() -> None:
    service = Service()
    async with serving(service) as (server, channel), raw_connection(server, channel) as connection:
        calls = [frame(HEADERS, 4, s, request_block("/t.T/Wait")) + frame(0, 1, s, bytes(5)) for s in range(1, 81, 2)]
        await asyncio.get_running_loop().sock_sendall(connection, b"".join(calls))
        most = before = 0
        while service.started < len(calls):
            await asyncio.sleep(0)  # one turn of the loop
            most, before = max(most, service.started - before), service.started
        assert 0 < most < 10, "what runs already has its turns between them"


async def test_many_calls_of_one_connection_do_not_delay_another_connection() -> None:
    service = Service()
    async with (
        serving(service) as (server, channel),
        raw_connection(server, channel) as connection,
        raw_connection(server, channel) as other,
    ):
        loop = asyncio.get_running_loop()
        block = request_block("/t.T/Wait")
        crowd = [frame(HEADERS, 4, s, block) + frame(0, 1, s, bytes(5)) for s in range(1, 4_001, 2)]
        await loop.sock_sendall(connection, b"".join(crowd))
        await service.begun.wait()
        await loop.sock_sendall(other, frame(HEADERS, 4, 1, request_block("/t.T/Echo")) + frame(0, 1, 1, bytes(5)))
        received = b""
        while b"grpc-status\x010" not in received:
            received += await loop.sock_recv(other, 1 << 16)
        assert service.started < len(crowd)


async def test_a_stopping_server_serves_the_calls_that_wait_for_their_turn() -> None:
    service = Service()
    async with serving(service) as (server, channel), raw_connection(server, channel) as connection:
        calls = [frame(HEADERS, 4, s, request_block("/t.T/Echo")) + frame(0, 1, s, bytes(5)) for s in range(1, 81, 2)]
        await asyncio.get_running_loop().sock_sendall(connection, b"".join(calls))
        await service.begun.wait()
        await server.stop(30.0)
        received = b""
        while more := await asyncio.get_running_loop().sock_recv(connection, 1 << 16):
            received += more
        assert received.count(b"grpc-status\x010") == len(calls)


async def test_unread_request_bytes_of_one_connection_are_bounded() -> None:
    """Each of a thousand streams may send the largest message, but not all of them at once."""
    service = Service()
    async with serving(service) as (server, channel), raw_connection(server, channel) as connection:
        loop = asyncio.get_running_loop()
        piece = struct.pack(">BI", 0, LIMIT) + bytes(16_000)
        for stream in range(1, 2 * 6 * LIMIT // len(piece), 2):
            begun = frame(HEADERS, 4, stream, request_block("/t.T/Echo")) + frame(0, 0, stream, piece)
            await loop.sock_sendall(connection, begun)
        received = b""
        while b"grpc-status\x018" not in received:
            received += await loop.sock_recv(connection, 1 << 16)


async def test_a_silent_client_that_answers_no_ping_is_disconnected() -> None:
    service = Service()
    async with serving(service, quiet_s=0.05) as (server, channel), raw_connection(server, channel) as connection:
        loop = asyncio.get_running_loop()
        request = frame(HEADERS, 4, 1, request_block("/t.T/Wait")) + frame(0, 1, 1, bytes(5))
        await loop.sock_sendall(connection, request)
        await service.cancelled.wait()
        received = b""
        with suppress(ConnectionError):
            while more := await loop.sock_recv(connection, 1 << 16):
                received += more
        assert frame(PING, 0, 0, b"")[3:5] in received


async def test_a_connection_that_does_not_speak_http2_is_closed() -> None:
    async with serving(Service()) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.read())[-4:] == struct.pack(">I", 1), "PROTOCOL_ERROR, and the end"
        writer.close()


async def test_a_health_watch_receives_each_change() -> None:
    server = streaming_server(("t.T",), FaultBarrier(), None)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="t.T"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_ready(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)


async def test_a_port_in_use_is_refused() -> None:
    first, second = (streaming_server((), FaultBarrier(), None) for _ in range(2))
    port = first.bind("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="the port is in use"):
        second.bind("127.0.0.1", port)
    third = RpcServer(())
    with pytest.raises(ConfigError, match="the port is in use"):
        third.bind("127.0.0.1", port)
    await first.stop(0)

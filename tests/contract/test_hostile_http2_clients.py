"""The limits on what HTTP/2 clients can make our gRPC server hold or do, with and without keys, by hand-made frames."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import struct
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from baton.security.authority import make_certificates
from baton.security.keys import KeyRing, new_key, write_keys
from baton.security.matrix import CallerRole, current_caller
from baton.security.tls_files import TlsFiles
from baton.wire.authenticator import Authenticator
from baton.wire.http2.frames import ENHANCE_YOUR_CALM, PREFACE, REFUSED_STREAM
from baton.wire.http2.header_blocks import HeaderReader, write_headers
from baton.wire.http2.server import MAX_KEYLESS_CALLS, Http2Server
from baton.wire.http2.server_link import UNAUTHENTICATED_STREAMS
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.turn_budget import Source, TurnBudget
from tests.support.http2_frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    frame,
    request_fields,
)

LIMIT = 1 << 20
UNARY = "/baton.v1.Generation/Tokenize"
GENERATE = "/baton.v1.Generation/Generate"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
INITIAL_WINDOW, MAX_STREAMS = 4, 3


class Service:
    """Has the name of the public service, whose callers need a key."""

    def __init__(self) -> None:
        self.tenants: list[str] = []
        self.num_waiting = 0

    async def tokenize(self, request: bytes, context: Any) -> bytes:
        self.tenants.append(current_caller.get().tenant)
        return bytes(len(request))

    async def generate(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.num_waiting += 1
        try:
            yield b"first"
            await asyncio.get_running_loop().create_future()
        finally:
            self.num_waiting -= 1

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        methods = {
            "Tokenize": grpc.unary_unary_rpc_method_handler(self.tokenize, bytes, bytes),
            "Generate": grpc.unary_stream_rpc_method_handler(self.generate, bytes, bytes),
        }
        return grpc.method_handlers_generic_handler("baton.v1.Generation", methods)


@asynccontextmanager
async def serving(keys: KeyRing | None = None, **more: Any) -> AsyncIterator[tuple[Http2Server, Service]]:
    barrier, service = FaultBarrier(authenticator=Authenticator(keys)), Service()
    server = Http2Server(
        (barrier,), max_message_bytes=LIMIT, max_metadata_bytes=8192, authenticator=barrier.authenticator, **more
    )
    server.add_insecure_port("127.0.0.1:0")
    server.add_generic_rpc_handlers((service.handler(),))
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)  # type: ignore[attr-defined]
    await server.start()
    try:
        yield server, service
    finally:
        await server.stop(0)


class Client:
    """A client with one connection that has sent its preface."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._headers = HeaderReader(1 << 16)
        self.statuses: dict[int, str] = {}
        """The gRPC status of each answered stream."""
        self.resets: dict[int, int] = {}
        self.max_streams = 0
        self.body = 0
        """The number of bytes of answers."""
        self.num_pongs = 0
        self.goaway: int | None = None

    @classmethod
    async def connect(cls, server: Http2Server, *settings: tuple[int, int]) -> Client:
        client = cls(*await asyncio.open_connection("127.0.0.1", server.port))
        client.send(PREFACE + frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in settings)))
        return client

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def call(self, stream: int, path: str, body: bytes | None = b"", key: str = "", flags: int = END_STREAM) -> None:
        """Start a call with a message; without a message and its end if `body` is None."""
        fields = [*request_fields(path), *((("authorization", f"Bearer {key}"),) if key else ())]
        self.send(frame(HEADERS, END_HEADERS, stream, write_headers(fields)))
        if body is not None:
            self.send(frame(DATA, flags, stream, message(body)))

    async def read_frame(self) -> bool:
        """Read one more frame; False if the connection has ended."""
        try:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        if kind == HEADERS:
            fields = dict(self._headers.read(payload) or ())
            if flags & END_STREAM:
                self.statuses[stream] = fields["grpc-status"]
        elif kind == DATA:
            self.body += len(payload)
        elif kind == RST_STREAM:
            self.resets[stream] = int.from_bytes(payload, "big")
        elif kind == PING and flags & ACK:
            self.num_pongs += 1
        elif kind == GOAWAY:
            self.goaway = int.from_bytes(payload[4:8], "big")
        elif kind == SETTINGS and not flags & ACK:
            self.max_streams = dict(struct.iter_unpack(">HI", payload)).get(MAX_STREAMS, self.max_streams)
        return True

    async def wait_until_processed(self) -> None:
        """Return once the server has processed everything that was sent."""
        self.send(frame(PING, 0, 0, bytes(8)))
        before = self.num_pongs
        while self.num_pongs == before:
            assert await self.read_frame()

    async def status_of(self, stream: int) -> grpc.StatusCode:
        while stream not in self.statuses:
            assert await self.read_frame()
        number = int(self.statuses[stream])
        return next(code for code in grpc.StatusCode if code.value[0] == number)

    async def read_to_end(self) -> None:
        while await self.read_frame():
            pass

    def abort(self) -> None:
        self._writer.transport.abort()


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


@pytest.fixture
def keys(tmp_path: Path) -> tuple[KeyRing, str]:
    key, entry = new_key("acme", CallerRole.CLIENT, "")
    write_keys(tmp_path / "keys", [entry])
    return KeyRing(tmp_path / "keys"), key


# The key, when the headers come.


@pytest.mark.timeout(10)
async def test_a_call_without_a_key_is_refused_as_soon_as_its_headers_arrive(keys: tuple[KeyRing, str]) -> None:
    async with serving(keys[0]) as (server, service):
        client = await Client.connect(server)
        client.call(1, UNARY, None)
        assert await client.status_of(1) is grpc.StatusCode.UNAUTHENTICATED
        assert server.num_open == server.num_calls == 0
        # What is still under way counts for nothing, and nothing of it is kept.
        client.send(frame(DATA, 0, 1, bytes(16_000)) * 20)
        await client.wait_until_processed()
        assert server.unread_requests.value == 0
        client.call(3, UNARY, b"abc", keys[1])
        assert await client.status_of(3) is grpc.StatusCode.OK
        assert service.tenants == ["acme"], "and whoever serves it knows who is calling"


@pytest.mark.timeout(10)
async def test_a_client_without_a_key_may_open_100_streams_and_one_with_a_key_10000(
    keys: tuple[KeyRing, str],
) -> None:
    async with serving(keys[0]) as (server, _):
        client = await Client.connect(server)
        for number in range(UNAUTHENTICATED_STREAMS + 20):
            client.call(2 * number + 1, WATCH, None)
        await client.wait_until_processed()
        assert client.max_streams == UNAUTHENTICATED_STREAMS
        assert server.num_open == UNAUTHENTICATED_STREAMS
        assert set(client.resets.values()) == {REFUSED_STREAM}
        known = await Client.connect(server)
        for number in range(3 * UNAUTHENTICATED_STREAMS):
            known.call(2 * number + 1, GENERATE, b"", keys[1])
        await known.wait_until_processed()
        assert known.max_streams == 10_000
        assert known.resets == {}
        assert server.num_open == 4 * UNAUTHENTICATED_STREAMS


@pytest.mark.timeout(10)
async def test_a_client_that_keeps_calling_without_a_key_is_disconnected(keys: tuple[KeyRing, str]) -> None:
    async with serving(keys[0]) as (server, _):
        client = await Client.connect(server)
        for number in range(1_100):
            client.call(2 * number + 1, GENERATE, None, "a guess")
        await client.read_to_end()
        assert client.goaway == ENHANCE_YOUR_CALM
        assert len(client.statuses) <= 1_001


# Calls that need no key.


@pytest.mark.timeout(20)
async def test_keyless_calls_of_the_process_are_bounded_and_a_probe_is_still_answered(
    keys: tuple[KeyRing, str],
) -> None:
    async with serving(keys[0]) as (server, _):
        crowd = [await Client.connect(server) for _ in range(MAX_KEYLESS_CALLS // UNAUTHENTICATED_STREAMS + 2)]
        for client in crowd:
            for number in range(UNAUTHENTICATED_STREAMS):
                client.call(2 * number + 1, WATCH)
        for client in crowd:
            await client.wait_until_processed()
        assert server.num_keyless == server.num_open <= MAX_KEYLESS_CALLS
        probe = await Client.connect(server)
        probe.call(1, CHECK)
        assert await probe.status_of(1) is grpc.StatusCode.OK, "a probe is answered all the same"
        for client in crowd:
            client.abort()
        while server.num_calls or server.num_open:
            await probe.wait_until_processed()
        assert server.num_keyless == 0


@pytest.mark.timeout(10)
async def test_a_keyless_call_may_bring_only_a_small_message() -> None:
    async with serving() as (server, _):
        client = await Client.connect(server)
        client.call(1, CHECK, bytes(5_000))
        assert await client.status_of(1) is grpc.StatusCode.RESOURCE_EXHAUSTED


# What a request may hold.


@pytest.mark.timeout(20)
async def test_a_second_message_ends_a_unary_call_and_further_ones_hold_no_memory() -> None:
    async with serving() as (server, _):
        client = await Client.connect(server)
        tracemalloc.start()
        try:
            for stream in range(1, 13, 2):
                client.call(stream, UNARY, None)
                for _ in range(64):
                    client.send(frame(DATA, 0, stream, message(b"") * 3_200))
                assert await client.status_of(stream) is grpc.StatusCode.UNIMPLEMENTED
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert server.unread_requests.value == 0
        assert most < 8 << 20, "6 MiB were sent, and are in this process's own buffers once"


@pytest.mark.timeout(10)
async def test_a_unary_call_without_a_message_is_refused() -> None:
    async with serving() as (server, _):
        client = await Client.connect(server)
        client.call(1, UNARY, None)
        client.send(frame(DATA, END_STREAM, 1))
        assert await client.status_of(1) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.timeout(10)
async def test_a_half_open_call_has_no_task_and_ends_at_its_time_limit() -> None:
    async with serving(request_s=0.05, quiet_s=0.05) as (server, service):
        client = await Client.connect(server)
        for stream in range(1, 41, 2):
            client.call(stream, GENERATE, None)
            client.send(frame(DATA, 0, stream, message(bytes(100))[:50]))
        await client.wait_until_processed()
        assert server.num_calls == 0
        for stream in range(1, 41, 2):
            assert await client.status_of(stream) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (server.num_open, server.unread_requests.value, service.num_waiting) == (0, 0, 0)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("said", [b"", PREFACE[:10], PREFACE, PREFACE + frame(SETTINGS, 0, 0)[:5]])
async def test_a_client_that_does_not_complete_its_preface_in_time_is_disconnected(said: bytes) -> None:
    async with serving(quiet_s=0.05) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(said)
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
        assert not server.connections
        writer.close()


# Slow readers.


@pytest.mark.timeout(10)
@pytest.mark.parametrize("path", [UNARY, CHECK, WATCH, GENERATE])
async def test_a_call_whose_answer_is_never_read_is_ended(path: str) -> None:
    async with serving(stall_s=0.05, quiet_s=0.05) as (server, _):
        client = await Client.connect(server, (INITIAL_WINDOW, 0))
        client.call(1, path)
        assert await client.status_of(1) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert client.body == 0
        await client.wait_until_processed()
        assert (server.num_open, server.num_calls) == (0, 0)


# One connection that ends, and many that flood.


@pytest.mark.timeout(20)
async def test_the_calls_of_a_lost_connection_end_a_few_per_turn_of_the_loop() -> None:
    async with serving() as (server, service):
        client = await Client.connect(server)
        num_calls = 300
        for number in range(num_calls):
            client.call(2 * number + 1, GENERATE)
        while service.num_waiting < num_calls:
            await client.wait_until_processed()
        client.abort()
        most = before = service.num_waiting
        most = 0
        while service.num_waiting:
            await asyncio.sleep(0)  # one turn of the loop
            most, before = max(most, before - service.num_waiting), service.num_waiting
        assert 0 < most <= 2 * 32


class CountingClock:
    """A clock that advances by a second whenever it is read, which happens for each piece of input.

    `most` is the largest time that passed in one turn of the loop.
    """

    def __init__(self) -> None:
        self.now_s = self.most = self._before = 0
        self._loop = asyncio.get_running_loop()
        self._turn()

    def __call__(self) -> float:
        self.now_s += 1
        return float(self.now_s)

    def _turn(self) -> None:
        self.most = max(self.most, self.now_s - self._before)
        self._before = self.now_s
        self._loop.call_soon(self._turn)


@pytest.mark.timeout(20)
async def test_all_flooding_connections_share_one_budget_per_turn_of_the_loop() -> None:
    clock = CountingClock()
    async with serving(budget=TurnBudget(asyncio.get_running_loop(), 10.0, clock)) as (server, _):
        victim = await Client.connect(server)
        flooders = [await Client.connect(server) for _ in range(40)]
        head = frame(HEADERS, END_HEADERS, 1, write_headers(request_fields(UNARY)))
        for one in flooders:
            one.send(head + frame(DATA, 0, 1, bytes(100)) * 3_000)
        while server.budget.num_waiting < 30:  # noqa: ASYNC110 - turns of the loop are what is counted
            await asyncio.sleep(0)
        before = clock.now_s
        victim.call(1, UNARY, b"abc")
        assert await victim.status_of(1) is grpc.StatusCode.OK
        assert clock.now_s - before < 40 * 8, "it came before most of what the others had brought"
        while server.budget.num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        # Each step takes a second, and the clock is read before it and after.
        assert 0 < clock.most <= 2 * 10


class HeldBudget(TurnBudget):
    """A budget that lets no input be parsed while it is held."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.is_held = False
        self.waiting: list[Source] = []

    def step(self, source: Source) -> None:
        if self.is_held:
            self.waiting.append(source)
        else:
            super().step(source)

    def release(self) -> None:
        self.is_held = False
        for source in self.waiting:
            super().step(source)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("has_tls", [False, True], ids=["clear", "tls"])
async def test_a_client_that_breaks_the_protocol_and_disconnects_at_once_leaves_no_connection(
    tmp_path: Path, has_tls: bool
) -> None:
    """asyncio's TLS does not close a connection that has ended while reading is paused."""
    make_certificates(tmp_path, "default", ["127.0.0.1"], 1, datetime.datetime.now(datetime.UTC))
    files = TlsFiles(tmp_path / "ca.crt", tmp_path / "router.crt", tmp_path / "router.key")
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt")) if has_tls else None
    budget = HeldBudget()
    async with serving(budget=budget, tls=files.server_context("h2") if has_tls else None) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        client = Client(reader, writer)
        client.send(PREFACE + frame(SETTINGS, 0, 0))
        await client.wait_until_processed()
        budget.is_held = True
        client.send(frame(DATA, 0, 0))
        writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
        while not budget.waiting:  # noqa: ASYNC110 - the server tells nobody that it has read
            await asyncio.sleep(0)
        for _ in range(10):  # the end of the connection is read in these turns of the loop
            await asyncio.sleep(0)
        budget.release()
        while server.connections:  # noqa: ASYNC110 - it tells nobody that a connection is gone
            await asyncio.sleep(0)
        writer.transport.abort()


@pytest.mark.timeout(20)
async def test_a_client_with_a_key_has_hundreds_of_streams_at_once(keys: tuple[KeyRing, str]) -> None:
    """grpcio opens the 101st stream only once the server allows it."""
    num_streams = 3 * UNAUTHENTICATED_STREAMS
    async with serving(keys[0]) as (server, service), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        metadata = (("authorization", f"Bearer {keys[1]}"),)
        streams = [channel.unary_stream(GENERATE, None, None)(b"", metadata=metadata) for _ in range(num_streams)]
        for one in streams:
            assert await one.read() == b"first"
        assert service.num_waiting == num_streams
        for one in streams:
            one.cancel()

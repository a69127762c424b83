"""The limits on connections of every port, and how ports behave when no more connections are possible."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc as grpclib
import pytest

from baton.observe.listener import ACCEPTED_AT_ONCE, HANDSHAKES_AT_ONCE, UNHEARD_AT_ONCE, Listener, listening_socket
from baton.observe.metrics_page import MetricsPage
from baton.security.authority import make_certificates
from baton.security.connection_limit import ConnectionLimit, Limits, Refusal
from baton.text.chat_template import DEFAULT_TEMPLATE
from baton.wire.http2.frames import PREFACE
from baton.wire.http2.header_blocks import write_headers
from baton.wire.http2.server import Http2Server
from router.http.server import HttpServer
from tests.support.http2_frames import END_HEADERS, HEADERS, SETTINGS, frame, request_fields
from tests.support.http_rig import HttpRig

LIMITS = Limits(process=4, listener=3, peer=2)
PAGE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
"""A request to each server and the first bytes of its answer: an HTTP/2 server begins with its settings."""
REQUESTS = {"http": (PAGE, b"HTTP/1.1 200 "), "metrics": (PAGE, b"HTTP/1.1 200 "), "grpc": (PREFACE, b"\0\0")}


@asynccontextmanager
async def http(limit: ConnectionLimit) -> AsyncIterator[int]:
    rig = HttpRig()
    server = HttpServer(rig.front(rig.handler, 1000.0, DEFAULT_TEMPLATE), limit=limit)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    yield port
    await server.stop(0.1)


@asynccontextmanager
async def grpc(limit: ConnectionLimit) -> AsyncIterator[int]:
    server = Http2Server(max_message_bytes=1 << 20, max_metadata_bytes=8192, limit=limit)
    methods = {"Wait": grpclib.unary_unary_rpc_method_handler(lambda *_: b"", bytes, bytes)}
    server.add_generic_rpc_handlers([grpclib.method_handlers_generic_handler("test", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop()


@asynccontextmanager
async def metrics(limit: ConnectionLimit) -> AsyncIterator[int]:
    page = MetricsPage(lambda: b"", limit=limit)
    yield await page.start("127.0.0.1", 0)
    await page.stop()


SERVERS = {"http": http, "grpc": grpc, "metrics": metrics}


async def is_served(port: int, kind: str) -> bool:
    """Whether a new connection is answered instead of closed."""
    question, begin = REQUESTS[kind]
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(question)
        found = await reader.readexactly(len(begin))
        writer.close()
        return found == begin
    except (ConnectionError, asyncio.IncompleteReadError):
        return False


async def wait_until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():  # noqa: ASYNC110  # the other end of a socket is what is waited for
        await asyncio.sleep(0)


async def wait_until_open(limit: ConnectionLimit, count: int) -> None:
    while limit.num_open != count:  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_port_accepts_up_to_its_limit_and_more_once_connections_close(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    limit = ConnectionLimit(LIMITS)
    async with SERVERS[kind](limit) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(LIMITS.peer)]
        await wait_until_open(limit, LIMITS.peer)
        with caplog.at_level(logging.WARNING):
            for _ in range(50):
                assert not await is_served(port, kind)
        assert limit.num_open == LIMITS.peer
        told = [record for record in caplog.records if "closes new connections" in record.getMessage()]
        assert len(told) == 1
        assert "from one address at one port is reached" in told[0].getMessage()
        for _, writer in idle:
            writer.close()
        await wait_until(lambda: is_served(port, kind))
        await wait_until_open(limit, 0)


GREETING = PREFACE + frame(SETTINGS, 0, 0)
CALL = frame(HEADERS, END_HEADERS, 1, write_headers(request_fields("/test/Wait")))
PARTIAL_REQUESTS = {"http": (PAGE[:6], PAGE[6:]), "metrics": (PAGE[:6], PAGE[6:]), "grpc": (GREETING, CALL)}
"""For each server: bytes that are no request yet, and the bytes that complete them to one."""


@pytest.mark.parametrize("kind", SERVERS)
async def test_the_longest_silent_connection_is_closed_for_a_new_one(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    limit = ConnectionLimit(Limits(process=9, listener=9, peer=9, silent=2))
    greeting, question = PARTIAL_REQUESTS[kind]

    def has_closed(count: int) -> Callable[[], Awaitable[bool]]:
        async def holds() -> bool:
            return limit.refused.total() == count

        return holds

    async with SERVERS[kind](limit) as port:
        connections = []
        with caplog.at_level(logging.WARNING):
            for number in range(5):
                connections.append(await asyncio.open_connection("127.0.0.1", port))
                connections[-1][1].write(greeting)
                await wait_until(has_closed(max(0, number - 1)))
                await wait_until_open(limit, min(2, number + 1))
        assert all(refusal is Refusal.SILENT for _, refusal in limit.refused)
        told = [record for record in caplog.records if "the longest silent one is closed" in record.getMessage()]
        assert len(told) == 1
        for reader, writer in connections[-2:]:
            writer.write(question)
            begin = REQUESTS[kind][1]
            assert await reader.readexactly(len(begin)) == begin
        await wait_until_silent(limit, 0)
        if kind != "metrics":  # it closes after its answer
            assert limit.num_open == 2, "whoever has asked for something stays, however many others come"
            others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            await wait_until_open(limit, 4)
            assert limit.num_silent == 2
            connections += others
        for _, writer in connections:
            writer.close()
        await wait_until_open(limit, 0)


async def test_a_caller_that_does_not_read_the_metrics_loses_its_connection() -> None:
    limit = ConnectionLimit(LIMITS)
    page = MetricsPage(lambda: b"x" * (16 << 20), limit=limit, timeout_s=0.05)
    port = await page.start("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port)) as caller:
        caller.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        await wait_until_open(limit, 1)
        await wait_until_open(limit, 0)
    await page.stop()


async def wait_until_silent(limit: ConnectionLimit, count: int) -> None:
    while limit.num_silent != count:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_ports_share_the_connection_limit_of_the_process() -> None:
    limit = ConnectionLimit(Limits(process=2, listener=2, peer=2))
    async with http(limit) as one, grpc(limit) as other:
        idle = [await asyncio.open_connection("127.0.0.1", one) for _ in range(2)]
        await wait_until_open(limit, 2)
        assert not await is_served(other, "grpc")
        idle[0][1].close()
        await wait_until(lambda: is_served(other, "grpc"))
        idle[1][1].close()


class AcceptingProtocol(asyncio.Protocol):
    def __init__(self, taken: asyncio.Event) -> None:
        self._taken = taken

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._taken.set()
        transport.close()


async def test_a_port_without_free_descriptors_waits_logs_once_and_continues(caplog: pytest.LogCaptureFixture) -> None:
    taken = asyncio.Event()
    listening = listening_socket("127.0.0.1", 0)
    listener = Listener("test", listening, lambda _place: AcceptingProtocol(taken), ConnectionLimit(LIMITS))
    clients = [socket.socket() for _ in range(20)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with caplog.at_level(logging.INFO):
        try:
            # Everything that is free below the highest one in use, too.
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(free_descriptor(), before[0]), before[1]))
            listener.start()
            for client in clients:
                client.connect(listening.getsockname())
            for _ in range(1000):
                await asyncio.sleep(0)
            assert not taken.is_set()
            told = [record.getMessage() for record in caplog.records]
            assert len(told) == 1
            assert "the port test can't accept connections ([Errno 24]" in told[0]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        await taken.wait()
    assert "accepts connections again" in caplog.records[1].getMessage()
    assert len([record for record in caplog.records if "accept" in record.getMessage()]) == 2
    listener.stop()
    await listener.wait_closed()
    listening.close()
    for client in clients:
        client.close()


def free_descriptor() -> int:
    """Return the lowest free descriptor: with this as the limit no descriptor can be opened."""
    found = os.open(os.devnull, os.O_RDONLY)
    os.close(found)
    return found


class Handshakes:
    """Counts the handshakes that begin in each turn of the loop."""

    def __init__(self) -> None:
        self.count = self.most = self._before = 0
        self._loop = asyncio.get_running_loop()
        self._turn()

    def begun(self, *_: object) -> None:
        self.count += 1

    async def max_until(self, count: int, figure: Callable[[], int]) -> int:
        """Return the largest value of `figure` over all turns wait_until `count` handshakes have begun."""
        most = figure()
        while self.count < count:
            most = max(most, figure())
            await asyncio.sleep(0)
        return most

    def _turn(self) -> None:
        self.most = max(self.most, self.count - self._before)
        self._before = self.count
        self._loop.call_soon(self._turn)


@asynccontextmanager
async def unfinished_handshakes(home: Path, num_clients: int) -> AsyncIterator[tuple[Handshakes, ConnectionLimit]]:
    """Run a gRPC server and clients that have sent the first message of a TLS handshake and nothing more."""
    make_certificates(home, "default", ["127.0.0.1"], 1, datetime.datetime.now(datetime.UTC))
    context, handshakes = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Handshakes()
    context.load_cert_chain(home / "router.crt", home / "router.key")
    # Called for each client's greeting.
    context.sni_callback = handshakes.begun
    limit = ConnectionLimit()
    server = Http2Server(tls=context, max_message_bytes=1 << 20, max_metadata_bytes=8192, limit=limit)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    greeting = client_hello(home / "ca.crt")
    # The kernel takes them, and what they say.
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_clients)]
    try:
        for client in clients:
            client.sendall(greeting)
        yield handshakes, limit
    finally:
        for client in clients:
            client.close()
        await server.stop(0)


@pytest.mark.timeout(20)
async def test_simultaneous_tls_handshakes_begin_a_few_per_turn_of_the_loop(tmp_path: Path) -> None:
    async with unfinished_handshakes(tmp_path, 60) as (handshakes, limit):
        most_waiting = await handshakes.max_until(60, lambda: limit.num_open - limit.num_silent)
    assert most_waiting > 30, "those whose turn has not come are not silent"
    # Those of two turns may meet.
    assert handshakes.most <= 2 * HANDSHAKES_AT_ONCE


@pytest.mark.timeout(20)
async def test_connections_beyond_a_number_of_handshakes_wait_in_the_kernel(tmp_path: Path) -> None:
    async with unfinished_handshakes(tmp_path, 500) as (handshakes, limit):
        most_waiting = await handshakes.max_until(500, lambda: limit.num_open - handshakes.count)
    # What was accepted in the last turns has not been seen to have spoken yet.
    assert most_waiting <= UNHEARD_AT_ONCE + 4 * ACCEPTED_AT_ONCE


@pytest.mark.parametrize(("num_unheard", "at_once"), [(UNHEARD_AT_ONCE, ACCEPTED_AT_ONCE), (UNHEARD_AT_ONCE + 1, 1)])
async def test_with_many_unread_connections_one_is_accepted_per_turn_of_the_loop(
    num_unheard: int, at_once: int
) -> None:
    listening, limit = listening_socket("127.0.0.1", 0), ConnectionLimit()
    clients = [socket.create_connection(listening.getsockname()) for _ in range(ACCEPTED_AT_ONCE)]
    listener = Listener("page", listening, lambda _: asyncio.Protocol(), limit, num_unheard=lambda: num_unheard)
    listener.start()
    turns = []
    while limit.num_open < ACCEPTED_AT_ONCE:
        already = limit.num_open
        await asyncio.sleep(0)
        turns.append(limit.num_open - already)
    assert max(turns) == at_once
    listener.stop()
    listening.close()
    for client in clients:
        client.close()


def client_hello(ca: Path) -> bytes:
    """Return the first message of a TLS client."""
    context, incoming, outgoing = ssl.create_default_context(cafile=str(ca)), ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    return outgoing.read()

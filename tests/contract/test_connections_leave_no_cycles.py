"""A connection to one of our ports is freed as soon as it ends: with the garbage collector off, none is left."""

from __future__ import annotations

import asyncio
import datetime
import logging
import ssl
from asyncio import selector_events, sslproto
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from baton.security.authority import make_certificates
from baton.security.connection_limit import ConnectionLimit
from baton.security.tls_files import TlsFiles
from baton.text.chat_template import DEFAULT_TEMPLATE
from baton.wire.http2.frames import PREFACE
from baton.wire.http2.server import Http2Server
from baton.wire.http2.server_link import ServerLink
from router.http.connection import Connection
from router.http.server import HttpServer
from tests.support.http2_frames import SETTINGS, frame
from tests.support.http_rig import HttpRig
from tests.support.uncollected import garbage_collector_off

NUM_CONNECTIONS = 10
# A class of asyncio's own, which its stubs leave out.
_SOCKET_TRANSPORT: type = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
_KINDS = (Connection, ServerLink, sslproto.SSLProtocol, _SOCKET_TRANSPORT)
PAGE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
REQUESTS = {"http": PAGE, "grpc": PREFACE + frame(SETTINGS, 0, 0)}
"""A request that each server answers."""
BODY = b'{"prompt":"ab","stream":true}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(BODY),
    BODY,
)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    certs = tmp_path_factory.mktemp("certs")
    make_certificates(certs, "default", ["127.0.0.1"], 1, datetime.datetime.now(datetime.UTC))
    return TlsFiles(certs / "ca.crt", certs / "router.crt", certs / "router.key")


@pytest.fixture(autouse=True)
def log_levels(caplog: pytest.LogCaptureFixture) -> None:
    """Let pytest keep all log records, whatever levels earlier tests have set."""
    caplog.set_level(logging.DEBUG, "baton")
    caplog.set_level(logging.DEBUG, "router")


@pytest.fixture(autouse=True)
def count_uncollected() -> Iterator[Callable[[], Counter[str]]]:
    """Counts the connections of servers that have not been freed."""
    with garbage_collector_off(*_KINDS, counts=lambda one: getattr(one, "_server_side", True)) as count_uncollected:
        yield count_uncollected


@asynccontextmanager
async def serving(kind: str, files: TlsFiles | None, limit: ConnectionLimit) -> AsyncIterator[tuple[int, HttpRig]]:
    rig = HttpRig()
    stop: Callable[[float], Awaitable[None]]
    if kind == "http":
        pages = HttpServer(rig.front(rig.handler, 1000.0, DEFAULT_TEMPLATE), tls=files, limit=limit)
        port = pages.bind("127.0.0.1", 0)
        await pages.start()
        stop = pages.stop
    else:
        context = files.server_context("h2") if files is not None else None
        calls = Http2Server(max_message_bytes=1 << 20, max_metadata_bytes=8192, limit=limit, tls=context)
        port = calls.add_insecure_port("127.0.0.1:0")
        await calls.start()
        stop = calls.stop
    try:
        yield port, rig
    finally:
        await stop(0.0)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Poll wait_until the condition holds: the server has no event for it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


WAYS = {
    "the client leaves after its answer": ("http", "grpc"),
    "the client closes after its answer": ("http", "grpc"),
    "the client leaves before it says anything": ("http", "grpc"),
    "the client leaves in the middle of a body": ("http",),
    "the client leaves while it is answered": ("http",),
    "the client sends what is not spoken here": ("http", "grpc"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("has_tls", [False, True], ids=["clear", "tls"])
@pytest.mark.parametrize(("way", "kind"), [(way, kind) for way, kinds in WAYS.items() for kind in kinds])
async def test_a_closed_connection_is_freed_without_the_garbage_collector(
    way: str, kind: str, has_tls: bool, tls: TlsFiles, count_uncollected: Callable[[], Counter[str]]
) -> None:
    limit, is_foreign = ConnectionLimit(), "not spoken" in way
    async with serving(kind, tls if has_tls else None, limit) as (port, rig):
        context = client_context() if has_tls and not is_foreign else None
        for _ in range(NUM_CONNECTIONS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            if "answer" in way and "while" not in way:
                writer.write(REQUESTS[kind])
                assert await reader.read(1 << 16)
            elif "while" in way:
                writer.write(POST)
                call = await rig.next_call()
            elif "body" in way:
                writer.write(POST[:-5])
                await writer.drain()
            elif is_foreign:
                writer.write(b"\x00 this is neither\r\n\r\n" * 20)
                with suppress(ConnectionError):
                    await reader.read()
            if "closes" in way:
                writer.close()
            else:
                writer.transport.abort()
            if "while" in way:
                await call.is_closed.wait()
        await wait_until(lambda: limit.num_open == 0)
        del reader, writer
        for _ in range(10):
            await asyncio.sleep(0)  # what the loop itself still holds
        assert count_uncollected() == Counter()

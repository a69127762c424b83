"""The HTTP front on real sockets: with the openai client, with broken or slow connections, and while it stops."""

from __future__ import annotations

import asyncio
import datetime
import json
import signal
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from baton.errors import ConfigError, EngineFault, QueueFull
from baton.messages.generation import Chunk
from baton.security.authority import make_certificates
from baton.security.http_access import PageAuthenticator
from baton.security.keys import KeyRing, write_keys
from baton.security.tls_files import TlsFiles
from router.http.server import HttpServer
from tests.support.http_rig import chunk, finished
from tests.support.router_parts import MODEL
from tests.support.served_http import served

PROMPT = {"model": MODEL, "prompt": "ab"}
STREAM = json.dumps({**PROMPT, "stream": True}).encode()


async def test_the_openai_client_retries_when_told_to() -> None:
    async with served() as one, one.client() as client:
        answer = asyncio.create_task(client.completions.create(model=MODEL, prompt="ab"))
        (await one.rig.next_call()).tell(QueueFull("no room", 0.01))
        (await one.rig.next_call()).tell(chunk(0, "cd"), finished())
        assert (await answer).choices[0].text == "cd"


async def test_the_openai_client_does_not_retry_when_told_not_to() -> None:
    import openai

    async with served() as one, one.client() as client:
        answer = asyncio.create_task(client.completions.create(model=MODEL, prompt="ab"))
        (await one.rig.next_call()).tell(EngineFault("NaN"))
        with pytest.raises(openai.InternalServerError) as caught:
            await answer
        assert caught.value.type == "server_error"
        assert one.rig.handler.calls.empty()


async def test_the_openai_client_raises_an_error_in_mid_stream() -> None:
    import openai

    async with served() as one, one.client() as client:
        asked = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True)
        stream = asyncio.create_task(asked)
        (await one.rig.next_call()).tell(chunk(0, "c"), EngineFault("NaN"))
        events = aiter(await stream)
        assert [(await anext(events)).choices[0].delta.content for _ in range(2)] == ["", "c"]
        with pytest.raises(openai.APIError, match="NaN"):
            await anext(events)


async def test_closing_a_connection_ends_its_request() -> None:
    async with served() as one:
        reader, writer = await one.connect()
        await one.post(writer, STREAM)
        call = await one.rig.next_call()
        call.tell(chunk(0, "c"))
        await reader.readuntil(b'"text":"c"')
        writer.close()
        await call.is_closed.wait()


async def test_a_client_that_reads_nothing_is_disconnected_and_delays_no_other() -> None:
    async with served(stall_s=1.0) as one, one.client() as client:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", one.port))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        await loop.sock_sendall(slow, head + b"content-length: %d\r\n\r\n" % len(STREAM) + STREAM)
        stuck = await one.rig.next_call()
        for place in range(400):
            stuck.tell(Chunk(place, (97,), "a" * 4096))
        answer = asyncio.create_task(client.completions.create(**PROMPT))  # type: ignore[call-overload]
        (await one.rig.next_call()).tell(chunk(0, "cd"), finished())
        assert (await answer).choices[0].text == "cd"
        assert not stuck.is_closed.is_set()
        # Most of it still waits at the core, where it is counted.
        assert stuck.num_unread > 200
        await stuck.is_closed.wait()
        slow.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", b"4"),
        (b"GET /livez HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 8192 + b"\r\n\r\n", b"431"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"200"),
        (b"HEAD /livez HTTP/1.0\r\n\r\n", b"200"),
    ],
)
async def test_valid_and_invalid_requests_are_answered(request_bytes: bytes, status: bytes) -> None:
    async with served() as one:
        reader, writer = await one.connect()
        writer.write(request_bytes)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 " + status)
        writer.close()


async def test_a_body_that_is_too_long_is_refused_while_it_arrives() -> None:
    async with served() as one:
        reader, writer = await one.connect()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n" + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 20)
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()


@pytest.mark.parametrize("is_tls", [False, True])
async def test_an_unknown_key_is_refused_before_the_body_is_read(tmp_path: Path, is_tls: bool) -> None:
    make_certificates(tmp_path, "c", ["localhost"], 1, datetime.datetime.now(datetime.UTC))
    write_keys(tmp_path / "keys", [])
    tls = TlsFiles(tmp_path / "ca.crt", tmp_path / "router.crt", tmp_path / "router.key") if is_tls else None
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt")) if is_tls else None
    async with served(authenticator=PageAuthenticator("127.0.0.1", "", KeyRing(tmp_path / "keys")), tls=tls) as one:
        reader, writer = await asyncio.open_connection("localhost", one.port, ssl=context)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 10_000)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"\r\nconnection: close\r\n" in answer
        length = int(answer.partition(b"content-length: ")[2].split()[0])
        assert json.loads(await reader.readexactly(length))["error"]["code"] == "invalid_api_key"
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


HEAD = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("said", [b"", HEAD[:30]])
async def test_a_client_without_a_complete_request_head_in_time_is_disconnected(said: bytes) -> None:
    async with served(head_s=0.05) as one:
        reader, writer = await one.connect()
        writer.write(said)
        assert await reader.read() == b""
        writer.close()


async def test_a_connection_without_a_complete_next_head_in_time_is_closed() -> None:
    async with served(head_s=1.0) as one:
        reader, writer = await one.connect()
        writer.write(HEAD)
        assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200 OK")
        writer.write(HEAD[:30])
        assert await reader.read() == b""
        writer.close()


async def test_the_time_limit_of_the_request_head_does_not_limit_the_answer() -> None:
    async with served(head_s=1.0) as one:
        reader, writer = await one.connect()
        await one.post(writer, json.dumps(PROMPT).encode())
        call = await one.rig.next_call()
        silent, other = await one.connect()
        assert await silent.read() == b"", "the time limit of a request head has passed"
        call.tell(chunk(0, "cd"), finished())
        assert b"200 OK" in await reader.readline()
        other.close()
        writer.close()


async def test_running_requests_may_end_when_the_server_stops() -> None:
    async with served() as one:
        reader, writer = await one.connect()
        await one.post(writer, STREAM)
        call = await one.rig.next_call()
        call.tell(chunk(0, "c"))
        await reader.readuntil(b'"text":"c"')
        stopping = asyncio.create_task(one.server.stop(30.0))
        call.tell(finished())
        assert b"[DONE]" in await reader.read()
        await stopping
        writer.close()
        with pytest.raises(ConnectionError):
            await one.connect()


async def test_requests_that_do_not_end_in_time_are_cut_when_the_server_stops(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as one:
        reader, writer = await one.connect()
        await one.post(writer, STREAM)
        call = await one.rig.next_call()
        call.tell(chunk(0, "c"))
        await reader.readuntil(b'"text":"c"')
        await one.server.stop(0.01)
        await call.is_closed.wait()
        assert b"[DONE]" not in await reader.read()
        writer.close()
    assert not any(record.exc_info for record in caplog.records)


async def test_the_server_leaves_the_signal_handlers_of_the_process_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with served():
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


async def test_a_port_in_use_is_named_in_the_error() -> None:
    async with served() as one:
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{one.port} for HTTP.*--http-port"):
            HttpServer(one.rig.front(one.rig.handler, 1.0, "")).bind("127.0.0.1", one.port)

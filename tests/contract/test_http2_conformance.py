"""Our HTTP/2 server against the cases of h2spec's list, through a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton.wire.http2.frames import PREFACE
from baton.wire.http2.server import Http2Server
from tests.support.http2_cases import CASES, MARKED, Case, ServerFrame
from tests.support.http2_frames import GOAWAY, HEADERS, SETTINGS, frame


async def echo(request: bytes, context: Any) -> bytes:
    return request


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    server = Http2Server(max_message_bytes=1 << 20, max_metadata_bytes=8192)
    port = server.add_insecure_port("127.0.0.1:0")
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


class Client:
    """A client with one connection, which records the frames of the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.frames: list[ServerFrame] = []

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def read_frame(self) -> bool:
        """Read one more frame; False if the connection has ended."""
        try:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        self.frames.append(ServerFrame(head[3], head[4], int.from_bytes(head[5:], "big"), payload))
        return True


def is_stream_over(frames: Sequence[ServerFrame]) -> bool:
    return any(one.kind == HEADERS and one.flags & 1 for one in frames)


async def is_kept(case: Case, port: int) -> bool:
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    client.send(PREFACE + frame(SETTINGS, 0, 0))
    *parts, last = case.sends
    for part in parts:
        client.send(part)
        while not is_stream_over(client.frames):
            assert await client.read_frame()
    client.send(last + MARKED)
    while not case.is_kept(client.frames) and await client.read_frame():
        pass
    client.send(frame(GOAWAY, 0, 0, bytes(8)))
    return case.is_kept(client.frames)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_the_server_behaves_as_the_case_requires(case: Case) -> None:
    async with serving() as port:
        assert await is_kept(case, port)


async def test_an_invalid_preface_ends_the_connection() -> None:
    """http2/3.5: an invalid preface."""
    async with serving() as port:
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        client.send(b"INVALID CONNECTION PREFACE\r\n\r\n")
        while await client.read_frame():
            pass
        assert client.frames[-1].kind == GOAWAY


def test_the_names_of_cases_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))

"""The request of a call: how much is kept while it is not read; and a call whose deadline passes before its turn."""

from __future__ import annotations

import asyncio
import gzip
import struct
import tracemalloc
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import grpc
import pytest

from baton.wire.http2.call import Call
from baton.wire.http2.call_headers import CallDetails, CallHead, CallRefused
from baton.wire.http2.header_blocks import HeaderReader
from tests.support.http2_frames import request_fields

LIMIT = 1 << 20


class FakeLink:
    """A connection that accepts everything."""

    peer = "ipv4:127.0.0.1:1"

    def __init__(self) -> None:
        self.sent = b""
        self.ended = asyncio.Event()
        self.last: dict[str, str] = {}

    def send_headers(self, stream: int, block: bytes) -> None:
        pass

    def send(self, stream: int, data: bytes) -> bool:
        self.sent += data
        return True

    def has_room(self, stream: int) -> bool:
        return True

    def finish(self, stream: int, block: bytes) -> None:
        self.last = dict(HeaderReader(1 << 16).read(block) or ())
        self.ended.set()

    end = finish

    @property
    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}


def message(data: bytes, *, is_compressed: bool = False) -> bytes:
    return struct.pack(">BI", is_compressed, len(data)) + data


def called(link: FakeLink, *more: tuple[str, str]) -> Call:
    return Call(link, 1, CallHead.read([*request_fields("/t.T/Echo"), *more]), LIMIT)


def squeezed(link: FakeLink) -> Call:
    return called(link, ("grpc-encoding", "gzip"))


async def serve(call: Call, handler: Any) -> None:
    async def find(_: CallDetails) -> Any:
        return handler

    call.task = asyncio.create_task(call.serve(find))
    await asyncio.wait([call.task])


async def echo(request: bytes, context: Any) -> bytes:
    return request


ECHO = grpc.unary_unary_rpc_method_handler(echo)


async def test_a_compressed_message_is_not_decompressed_before_it_is_read() -> None:
    """Otherwise a megabyte on the wire would become a gigabyte in memory."""
    link = FakeLink()
    small = message(gzip.compress(bytes(LIMIT)), is_compressed=True)
    tracemalloc.start()
    calls = [squeezed(link) for _ in range(50)]
    for call in calls:
        call.receive(small, is_ended=True)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < LIMIT
    await serve(calls[0], ECHO)
    assert link.sent == message(bytes(LIMIT))


async def test_a_message_that_would_be_too_large_is_not_decompressed() -> None:
    link = FakeLink()
    call = squeezed(link)
    call.receive(message(gzip.compress(bytes(100 * LIMIT)), is_compressed=True), is_ended=True)
    tracemalloc.start()
    await serve(call, ECHO)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert link.last["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    assert most < 4 * LIMIT


@pytest.mark.parametrize("keep", [0, 10, -1])
async def test_a_truncated_compressed_message_is_an_error(keep: int) -> None:
    link = FakeLink()
    call = squeezed(link)
    call.receive(message(gzip.compress(b"a whole message")[:keep], is_compressed=True), is_ended=True)
    await serve(call, ECHO)
    assert link.last["grpc-status"] == str(grpc.StatusCode.INTERNAL.value[0])


async def test_unread_messages_are_bounded() -> None:
    call = called(FakeLink())
    for _ in range(8):
        call.receive(message(bytes(LIMIT // 2)), is_ended=False)
    assert call.num_unread <= 3 * LIMIT


async def test_a_message_that_arrives_byte_by_byte_is_joined_once() -> None:
    link, data = FakeLink(), bytes(range(256)) * 16
    call = called(link)
    for byte in message(data):
        call.receive(bytes((byte,)), is_ended=False)
    call.receive(b"", is_ended=True)
    await serve(call, ECHO)
    assert link.sent == message(data)


async def test_a_call_whose_deadline_passes_before_its_turn_is_answered_and_does_not_begin() -> None:
    link = FakeLink()
    call = called(link, ("grpc-timeout", "1n"))
    await link.ended.wait()
    assert call.is_over
    assert link.last["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])


async def test_an_error_is_raised_after_the_messages_before_it() -> None:
    link = FakeLink()
    call = called(link)
    call.receive(message(b"first"), is_ended=False)
    call.refuse(CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, "enough"))
    call.receive(message(b"second"), is_ended=True)
    heard: list[bytes] = []

    async def listen(requests: AsyncIterator[bytes], context: Any) -> bytes:
        async for request in requests:
            heard.append(request)  # noqa: PERF401 - what was heard before the fault counts
        return b""

    await serve(call, grpc.stream_unary_rpc_method_handler(listen))
    assert heard == [b"first"]
    assert link.last["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])

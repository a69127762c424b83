"""What HTTP/2 asks of a server (RFC 9113, RFC 7541), case by case in the order and with the numbers of h2spec's list.

A case is what a client says and what must come of it. Where the RFC leaves a choice, any of the choices will do.
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


class Said(NamedTuple):
    """A frame of the server's."""

    kind: int
    flags: int
    stream: int
    payload: bytes


Verdict = Callable[[Sequence[Said]], bool]
"""Of what the server has said so far."""


class Case(NamedTuple):
    name: str
    says: Sequence[bytes]
    """Behind the greetings; between two of them the end of stream 1 is waited for, and then a ping is sent."""
    is_kept: Verdict


# What must come of it.


def _codes(said: Sequence[Said], kind: int) -> Iterator[int]:
    for one in said:
        if one.kind == kind:
            yield int.from_bytes(one.payload[-4:], "big")


def ends(*codes: int) -> Verdict:
    """The connection, for one of these reasons."""
    return lambda said: any(code in codes for code in _codes(said, GOAWAY))


def breaks(*codes: int) -> Verdict:
    """The stream, or the connection."""
    return lambda said: any(code in codes for kind in (RST_STREAM, GOAWAY) for code in _codes(said, kind))


def is_answered(said: Sequence[Said]) -> bool:
    return any(one.kind == HEADERS and one.stream == 1 and one.flags & END_STREAM for one in said)


def goes_on(said: Sequence[Said]) -> bool:
    return Said(PING, ACK, 0, MARK) in said and GOAWAY not in {one.kind for one in said}


def first_data_of(size: int) -> Verdict:
    """The first bytes of the body come in one piece of this size."""

    def verdict(said: Sequence[Said]) -> bool:
        sizes = [len(one.payload) for one in said if one.kind == DATA]
        return bool(sizes) and sizes[0] == size

    return verdict


# What is said.

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
    yield Case("generic/2 PRIORITY of an idle stream", [priority(1, 0, 255)], goes_on)
    no_window = settings((INITIAL_WINDOW, 0))
    yield Case("generic/2 WINDOW_UPDATE half-closed", [no_window + CALL + number(8, 1, 1)], first_data_of(1))
    later = no_window + CALL + priority(1, 0, 255) + number(8, 1, 1)
    yield Case("generic/2 PRIORITY half-closed", [later], first_data_of(1))
    yield Case("generic/2 RST_STREAM half-closed", [WHOLE + number(RST_STREAM, 1, 8)], goes_on)
    yield Case("generic/2 PRIORITY closed", [WHOLE, priority(1, 0, 255)], goes_on)
    yield Case("generic/3.1 DATA", [CALL], is_answered)
    yield Case("generic/3.1 several DATA", [OPEN + body(MESSAGE[:6], 0) + body(MESSAGE[6:])], is_answered)
    yield Case("generic/3.1 DATA with padding", [OPEN + body(b"\x06" + MESSAGE + bytes(6), 9)], is_answered)
    yield Case("generic/3.2 HEADERS", [WHOLE], is_answered)
    yield Case("generic/3.2 HEADERS with padding", [block(b"\x06" + BLOCK + bytes(6), 13)], is_answered)
    yield Case("generic/3.2 HEADERS with priority", [block(bytes(4) + b"\xff" + BLOCK, 0x25)], is_answered)
    for what, said in (
        ("of priority 1", priority(1, 0)),
        ("of priority 256", priority(1, 0, 255)),
        ("on another stream", priority(3, 1)),
        ("on the root alone", priority(1, 1 << 31)),
        ("of a higher idle stream", priority(5, 0, 255)),
    ):
        yield Case(f"generic/3.3 PRIORITY {what}", [said + CALL], is_answered)
    yield Case("generic/3.4 RST_STREAM", [OPEN + number(RST_STREAM, 1, 8)], goes_on)
    yield Case("generic/3.5 SETTINGS", [settings((INITIAL_WINDOW, 65_535))], goes_on)
    yield Case("generic/3.7 PING", [NONE], goes_on)
    yield Case("generic/3.8 GOAWAY", [frame(GOAWAY, 0, 0, bytes(8))], goes_on)
    yield Case("generic/3.9 WINDOW_UPDATE of all", [number(8, 0, 1)], goes_on)
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
    def greets(said: Sequence[Said]) -> bool:
        return said[:1] != [] and said[0].kind == SETTINGS and not said[0].flags & ACK

    yield Case("http2/3.5 the server's own preface", [NONE], greets)
    yield Case("http2/4.1 a frame of unknown kind", [frame(22, 0, 0, bytes(8))], goes_on)
    yield Case("http2/4.1 a flag of unknown meaning", [frame(PING, 0x16, 0, MARK)], goes_on)
    yield Case("http2/4.1 the reserved bit", [frame(PING, 0, 1 << 31, MARK)], goes_on)
    full = struct.pack(">BI", 0, 16_379) + bytes(16_379)
    yield Case("http2/4.2 DATA of the largest size", [OPEN + body(full)], is_answered)
    yield Case("http2/4.2 DATA beyond it", [OPEN + body(bytes(16_385))], breaks(FRAME_SIZE))
    yield Case("http2/4.2 HEADERS beyond it", [headers(fields(("x", "y" * 16_385)))], ends(FRAME_SIZE))
    yield Case("http2/4.3 a broken block", [block(b"\x40", 5)], ends(COMPRESSION))
    begun = block(BLOCK, END_STREAM)
    rest = frame(CONTINUATION, END_HEADERS, 1, MORE)
    yield Case("http2/4.3 PRIORITY within a block", [begun + priority(1, 0) + rest], ends(PROTOCOL))
    yield Case("http2/4.3 HEADERS within a block", [begun + headers(stream=3) + rest], ends(PROTOCOL))
    yield Case("http2/5.4.1 a fault ends the connection", [frame(PING, 0, 3, bytes(8))], ends(PROTOCOL))

    def names_the_last(said: Sequence[Said]) -> bool:
        return any(one.kind == GOAWAY and one.payload[:4] == b"\0\0\0\x01" for one in said)

    yield Case("http2/5.4.1 GOAWAY names the last stream", [WHOLE + frame(PING, 0, 3, bytes(8))], names_the_last)
    yield Case("http2/5.5 an unknown frame", [frame(22, 0, 0, bytes(8))], goes_on)
    yield Case("http2/5.5 an unknown frame within a block", [begun + frame(22, 0, 0, bytes(8))], ends(PROTOCOL))


def _streams() -> Iterator[Case]:
    continued = frame(CONTINUATION, END_HEADERS, 1, MORE)
    for what, said in (("DATA", body()), ("RST_STREAM", number(3, 1, 8)), ("WINDOW_UPDATE", number(8, 1, 100))):
        yield Case(f"http2/5.1 idle: {what}", [said], ends(PROTOCOL))
    yield Case("http2/5.1 idle: CONTINUATION", [frame(CONTINUATION, END_HEADERS, 1, BLOCK)], ends(PROTOCOL))
    yield Case("http2/5.1 half-closed: DATA", [WHOLE + body()], breaks(STREAM_CLOSED))
    yield Case("http2/5.1 half-closed: HEADERS", [WHOLE + WHOLE], breaks(STREAM_CLOSED))
    yield Case("http2/5.1 half-closed: CONTINUATION", [WHOLE + continued], breaks(STREAM_CLOSED, PROTOCOL))
    was_reset = OPEN + number(RST_STREAM, 1, 8)
    yield Case("http2/5.1 reset: DATA", [was_reset + body()], breaks(STREAM_CLOSED))
    yield Case("http2/5.1 reset: HEADERS", [was_reset + WHOLE], breaks(STREAM_CLOSED))
    yield Case("http2/5.1 reset: CONTINUATION", [was_reset + continued], breaks(STREAM_CLOSED, PROTOCOL))
    yield Case("http2/5.1 closed: DATA", [WHOLE, body()], ends(STREAM_CLOSED))
    yield Case("http2/5.1 closed: HEADERS", [WHOLE, WHOLE], ends(STREAM_CLOSED))
    yield Case("http2/5.1 closed: CONTINUATION", [WHOLE, continued], ends(STREAM_CLOSED, PROTOCOL))
    yield Case("http2/5.1.1 an even number", [headers(stream=2)], ends(PROTOCOL))
    lower = headers(stream=5) + headers(stream=3)
    yield Case("http2/5.1.1 a lower number than before", [lower], ends(PROTOCOL, STREAM_CLOSED))
    many = settings((INITIAL_WINDOW, 0)) + b"".join(
        headers(stream=stream, flags=0) for stream in range(1, 2 * 10_001 + 1, 2)
    )
    yield Case("http2/5.1.2 more streams than there may be", [many], breaks(PROTOCOL, REFUSED))
    itself = block(struct.pack(">IB", 1, 255) + BLOCK, 0x25)
    yield Case("http2/5.3.1 HEADERS that depend on themselves", [itself], breaks(PROTOCOL))
    yield Case("http2/5.3.1 PRIORITY that depends on itself", [priority(1, 1)], breaks(PROTOCOL))


def _frames() -> Iterator[Case]:
    yield Case("http2/6.1 DATA of stream 0", [body(stream=0)], ends(PROTOCOL))
    yield Case("http2/6.1 DATA of a closed stream", [WHOLE + body()], breaks(STREAM_CLOSED))
    yield Case("http2/6.1 DATA with too much padding", [OPEN + body(b"\x06Test", 9)], ends(PROTOCOL))
    begun = block(BLOCK, END_STREAM)
    yield Case("http2/6.2 PRIORITY behind HEADERS without an end", [begun + priority(1, 0)], ends(PROTOCOL))
    yield Case("http2/6.2 HEADERS behind HEADERS without an end", [begun + headers(stream=3)], ends(PROTOCOL))
    yield Case("http2/6.2 HEADERS of stream 0", [headers(stream=0)], ends(PROTOCOL))
    padded = block(bytes([len(BLOCK) + 2]) + BLOCK, 13)
    yield Case("http2/6.2 HEADERS with too much padding", [padded], ends(PROTOCOL))
    yield Case("http2/6.3 PRIORITY of stream 0", [priority(0, 1)], ends(PROTOCOL))
    yield Case("http2/6.3 PRIORITY of 4 bytes", [OPEN + frame(PRIORITY, 0, 1, bytes(4))], breaks(FRAME_SIZE))
    yield Case("http2/6.4 RST_STREAM of stream 0", [number(RST_STREAM, 0, 8)], ends(PROTOCOL))
    yield Case("http2/6.4 RST_STREAM of an idle stream", [number(RST_STREAM, 1, 8)], ends(PROTOCOL))
    yield Case("http2/6.4 RST_STREAM of 3 bytes", [OPEN + frame(RST_STREAM, 0, 1, bytes(3))], ends(FRAME_SIZE))
    yield Case("http2/6.5 SETTINGS ACK that says something", [frame(SETTINGS, ACK, 0, bytes(6))], ends(FRAME_SIZE))
    yield Case("http2/6.5 SETTINGS of a stream", [frame(SETTINGS, 0, 1, bytes(6))], ends(PROTOCOL))
    yield Case("http2/6.5 SETTINGS of 3 bytes", [frame(SETTINGS, 0, 0, bytes(3))], ends(FRAME_SIZE))
    yield Case("http2/6.5.2 ENABLE_PUSH 2", [settings((ENABLE_PUSH, 2))], ends(PROTOCOL))
    yield Case("http2/6.5.2 INITIAL_WINDOW 2^31", [settings((INITIAL_WINDOW, 1 << 31))], ends(FLOW_CONTROL))
    yield Case("http2/6.5.2 MAX_FRAME 16,383", [settings((MAX_FRAME, 16_383))], ends(PROTOCOL))
    yield Case("http2/6.5.2 MAX_FRAME 2^24", [settings((MAX_FRAME, 1 << 24))], ends(PROTOCOL))
    yield Case("http2/6.5.2 an unknown setting", [settings((0xFF, 1))], goes_on)
    two = settings((INITIAL_WINDOW, 100), (INITIAL_WINDOW, 1))
    yield Case("http2/6.5.3 the last of two values counts", [two + CALL], first_data_of(1))
    yield Case("http2/6.5.3 SETTINGS are acknowledged", [settings((ENABLE_PUSH, 0))], _acknowledged_twice)
    yield Case("http2/6.7 PING is answered", [NONE], goes_on)
    yield Case("http2/6.7 PING ACK is not", [frame(PING, ACK, 0, b"invalid-")], _answers_the_mark_alone)
    yield Case("http2/6.7 PING of a stream", [frame(PING, 0, 1, bytes(8))], ends(PROTOCOL))
    yield Case("http2/6.7 PING of 6 bytes", [frame(PING, 0, 0, bytes(6))], ends(FRAME_SIZE))
    yield Case("http2/6.8 GOAWAY of a stream", [frame(GOAWAY, 0, 1, bytes(8))], ends(PROTOCOL))
    two = block(BLOCK[:9], END_STREAM) + frame(CONTINUATION, 0, 1, BLOCK[9:])
    yield Case("http2/6.10 several CONTINUATION", [two + frame(CONTINUATION, END_HEADERS, 1, MORE)], is_answered)
    yield Case("http2/6.10 DATA behind one without an end", [two + body()], ends(PROTOCOL))
    yield Case("http2/6.10 CONTINUATION of stream 0", [begun + frame(CONTINUATION, 4, 0, MORE)], ends(PROTOCOL))
    more = frame(CONTINUATION, END_HEADERS, 1, MORE)
    yield Case("http2/6.10 CONTINUATION behind the end of HEADERS", [OPEN + more], ends(PROTOCOL))
    yield Case("http2/6.10 CONTINUATION behind the end of another", [begun + more + more], ends(PROTOCOL))
    yield Case("http2/6.10 CONTINUATION behind DATA", [OPEN + body(flags=0) + more], ends(PROTOCOL))
    yield Case("http2/7 GOAWAY of an unknown code", [frame(GOAWAY, 0, 0, bytes(4) + b"\0\0\0\xff")], goes_on)
    yield Case("http2/7 RST_STREAM of an unknown code", [OPEN + number(RST_STREAM, 1, 0xFF)], goes_on)


def _acknowledged_twice(said: Sequence[Said]) -> bool:
    return said.count(Said(SETTINGS, ACK, 0, b"")) == 2


def _answers_the_mark_alone(said: Sequence[Said]) -> bool:
    return [one.payload for one in said if one.kind == PING] == [MARK]


def _windows() -> Iterator[Case]:
    yield Case("http2/6.9 WINDOW_UPDATE by 0", [number(8, 0, 0)], ends(PROTOCOL))
    yield Case("http2/6.9 WINDOW_UPDATE of a stream by 0", [OPEN + number(8, 1, 0)], breaks(PROTOCOL))
    yield Case("http2/6.9 WINDOW_UPDATE of 3 bytes", [frame(WINDOW_UPDATE, 0, 0, bytes(3))], ends(FRAME_SIZE))
    yield Case("http2/6.9.1 no more than the window", [settings((INITIAL_WINDOW, 1)) + CALL], first_data_of(1))
    most = (1 << 31) - 1
    yield Case("http2/6.9.1 a window beyond 2^31 - 1", [number(8, 0, most) * 2], ends(FLOW_CONTROL))
    yield Case("http2/6.9.1 a stream's window beyond it", [OPEN + number(8, 1, most) * 2], breaks(FLOW_CONTROL))
    later = settings((INITIAL_WINDOW, 0)) + CALL + settings((INITIAL_WINDOW, 1))
    yield Case("http2/6.9.2 windows that grow later", [later], first_data_of(1))

    def waits_below_zero(said: Sequence[Said]) -> bool:
        return [len(one.payload) for one in said if one.kind == DATA] == [3, 1]

    # What closes it again comes with the second part: by then the three bytes that fit are out.
    below = [settings((INITIAL_WINDOW, 3)) + CALL + WHOLE_ELSEWHERE, settings((INITIAL_WINDOW, 2)) + number(8, 1, 2)]
    yield Case("http2/6.9.2 windows below zero", below, waits_below_zero)
    yield Case("http2/6.9.2 a first window of 2^31", [settings((INITIAL_WINDOW, 1 << 31))], ends(FLOW_CONTROL))


WHOLE_ELSEWHERE = headers(stream=3)


def _requests() -> Iterator[Case]:
    yield Case("http2/8.1 HEADERS twice without an end", [OPEN + OPEN + body()], breaks(PROTOCOL))
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
        yield Case(f"http2/{what}", [headers(bad)], breaks(PROTOCOL))
    pseudo = OPEN + body(flags=0) + headers([(":method", "200")])
    yield Case("http2/8.1.2.1 a pseudo-header in trailers", [pseudo], breaks(PROTOCOL))
    short = headers(fields(("content-length", "1")), flags=0)
    yield Case("http2/8.1.2.6 content-length of one DATA", [short + body()], breaks(PROTOCOL))
    yield Case("http2/8.1.2.6 content-length of two", [short + body(flags=0) + body(b"x")], breaks(PROTOCOL))
    push = frame(PUSH_PROMISE, END_HEADERS, 1, bytes(3) + b"\x02" + BLOCK)
    yield Case("http2/8.2 PUSH_PROMISE", [OPEN + push], ends(PROTOCOL))


def _compression() -> Iterator[Case]:
    for what, said in (
        ("2.3.3 an index beyond the table", BLOCK + b"\xff\x80\x01"),
        ("2.3.3 a name beyond the table", BLOCK + b"\x7f\x80\x01\x04test"),
        ("4.2 a new size at the end", BLOCK + b"\x21"),
        ("5.2 padding of more than 7 bits", BLOCK + b"\x00\x85\xf2\xb2\x4a\x84\xff\x85\x9c\x48\xac\xa4\xff"),
        ("5.2 padding of zeros", BLOCK + b"\x00\x85\xf2\xb2\x4a\x84\x80\x82\x9c\x48"),
        ("5.2 the mark of the end", BLOCK + b"\x00\x85\xf2\xb2\x4a\x84\xff\x84\xff\xff\xff\xff"),
        ("6.1 index 0", BLOCK + b"\x80"),
        ("6.3 a size beyond the bound", b"\x3f\xe2\x1f" + BLOCK),
    ):
        yield Case(f"hpack/{what}", [block(said)], ends(COMPRESSION))


CASES: Sequence[Case] = tuple(
    case for group in (_generic, _connection, _streams, _frames, _windows, _requests, _compression) for case in group()
)

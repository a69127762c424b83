"""Makes and parses HTTP/2 frames, for tests of the code that reads them."""

from __future__ import annotations

import struct

from baton.wire.http2.header_blocks import Header, write_headers

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame, valid or not."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def window_update(stream: int, more: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", more))


def first_window(size: int) -> bytes:
    """Return settings with the initial window of all streams."""
    return frame(SETTINGS, 0, 0, struct.pack(">HI", 4, size))


def parse_frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """Return kind, flags, stream and payload of each frame in `data`."""
    frames, at = [], 0
    while at < len(data):
        stop = at + 9 + int.from_bytes(data[at : at + 3], "big")
        frames.append((data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9], "big"), data[at + 9 : stop]))
        at = stop
    return frames


def body_of(data: bytes, stream: int) -> bytes:
    """Return what the DATA frames of a stream carry."""
    return b"".join(payload for kind, _, number, payload in parse_frames(data) if kind == DATA and number == stream)


def request_fields(path: str) -> list[Header]:
    """Return the header fields of a gRPC call."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]


def request_block(path: str) -> bytes:
    """Return the encoded headers of a gRPC call."""
    return write_headers(request_fields(path))

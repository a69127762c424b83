"""HTTP/2's frames (RFC 9113, 4 to 6): the numbers that both ends of a connection speak, and how they are written."""

from __future__ import annotations

import struct
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR = 0, 1, 3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = 5, 6, 7, 8, 9
ENHANCE_YOUR_CALM, INADEQUATE_SECURITY = 11, 12

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_HEADER_LIST = 2, 3, 4, 5, 6
FRAME = struct.Struct(">IBI")
"""A frame's header; the first number is its length and, in the last byte, its kind."""
FRAME_HEADER_BYTES = 9
MAX_FRAME_BYTES = 16_384
"""Neither end asks for larger ones."""
DEFAULT_WINDOW = 65_535
LARGEST_WINDOW = (1 << 31) - 1
LARGEST_FRAME = (1 << 24) - 1


class ConnectionFault(Exception):
    """The peer broke a rule that all streams depend on."""

    def __init__(self, code: int, story: str) -> None:
        super().__init__(story)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A whole one."""
    return FRAME.pack(len(payload) << 8 | kind, flags, stream) + payload


def header_frames(stream: int, flags: int, block: bytes) -> list[bytes]:
    """A block of headers, in as many frames as it takes. `flags`: END_STREAM or nothing."""
    frames, kind = [], HEADERS
    while len(block) > MAX_FRAME_BYTES:
        frames.append(frame(kind, flags, stream, block[:MAX_FRAME_BYTES]))
        kind, flags, block = CONTINUATION, 0, block[MAX_FRAME_BYTES:]
    frames.append(frame(kind, flags | END_HEADERS, stream, block))
    return frames


def number_of(payload: bytes) -> int:
    """Of 32 bits; raises ConnectionFault where there are more or fewer."""
    if len(payload) != 4:
        raise ConnectionFault(FRAME_SIZE_ERROR, "a frame is not as long as its kind")
    return int.from_bytes(payload, "big")


def unpadded(payload: bytes) -> bytes:
    """Of a frame with PADDED; raises ConnectionFault."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(PROTOCOL_ERROR, "more padding than there is")
    return payload[1 : len(payload) - payload[0]]


class FrameReader:
    """One peer's frames, in the order in which they come, each block of headers as one."""

    __slots__ = ("_block", "_buffer", "_max_block_bytes", "has_settings")

    def __init__(self, max_block_bytes: int) -> None:
        """`max_block_bytes`: of headers that are continued, as they are sent."""
        self._max_block_bytes = max_block_bytes
        self._buffer = b""
        self.has_settings = False
        """They came, as they must before anything else does."""
        self._block: tuple[int, int, bytearray] | None = None
        """Headers without an end: their stream, its flags, and what has come."""

    def read(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of what is whole now; CONTINUATION is in its HEADERS. To be used up before
        the next bytes. Raises ConnectionFault, after which it can't go on.
        """
        data = self._buffer + data if self._buffer else data
        at, end = 0, len(data)
        while end - at >= FRAME_HEADER_BYTES:
            head, flags, stream = FRAME.unpack_from(data, at)
            if head >> 8 > MAX_FRAME_BYTES:
                raise ConnectionFault(FRAME_SIZE_ERROR, "a frame is too large")
            stop = at + FRAME_HEADER_BYTES + (head >> 8)
            if stop > end:
                break
            kind, stream, payload = head & 0xFF, stream & LARGEST_WINDOW, data[at + FRAME_HEADER_BYTES : stop]
            at = stop
            if not self.has_settings:
                if kind != SETTINGS:
                    raise ConnectionFault(PROTOCOL_ERROR, "it does not begin with its settings")
                self.has_settings = True
            if kind in (HEADERS, CONTINUATION) or self._block is not None:
                whole = self._add_to_block(kind, flags, stream, payload)
                if whole is not None:
                    yield whole
            else:
                yield kind, flags, stream, payload
        self._buffer = data[at:]

    def _add_to_block(self, kind: int, flags: int, stream: int, payload: bytes) -> tuple[int, int, int, bytes] | None:
        if self._block is None:
            if kind == CONTINUATION:
                raise ConnectionFault(PROTOCOL_ERROR, "nothing is to be continued")
            if stream == 0:
                raise ConnectionFault(PROTOCOL_ERROR, "headers of no stream")
            fragment = _header_fragment(flags, stream, payload)
            if flags & END_HEADERS:
                return HEADERS, flags, stream, fragment
            self._block = (stream, flags, bytearray(fragment))
            return None
        first, first_flags, block = self._block
        if kind != CONTINUATION or first != stream:
            raise ConnectionFault(PROTOCOL_ERROR, "something came between headers")
        # An empty one is free for the peer, and has no end.
        if not payload and not flags & END_HEADERS:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "headers are continued with nothing")
        block += payload
        if len(block) > self._max_block_bytes:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "headers do not end")
        if not flags & END_HEADERS:
            return None
        self._block = None
        return HEADERS, first_flags, stream, bytes(block)


def _header_fragment(flags: int, stream: int, payload: bytes) -> bytes:
    """What a HEADERS frame has of its block; raises ConnectionFault."""
    block = unpadded(payload) if flags & PADDED else payload
    if flags & HAS_PRIORITY:
        if len(block) < 5:
            raise ConnectionFault(FRAME_SIZE_ERROR, "headers without a whole priority")
        if number_of(block[:4]) & LARGEST_WINDOW == stream:
            raise ConnectionFault(PROTOCOL_ERROR, "a stream that depends on itself")
        block = block[5:]
    return block

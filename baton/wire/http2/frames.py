"""The frames of HTTP/2 (RFC 9113, 4 to 6): their numbers, how they are written, and how they are read."""

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
"""A frame's header (4.1): its length and, in the last byte of the first number, its kind; its flags; its stream."""
FRAME_HEADER_BYTES = 9
MAX_FRAME_BYTES = 16_384
"""The payload of a frame: we ask for no larger ones (SETTINGS_MAX_FRAME_SIZE)."""
DEFAULT_WINDOW = 65_535
LARGEST_WINDOW = (1 << 31) - 1
LARGEST_FRAME = (1 << 24) - 1


class ConnectionFault(Exception):
    """The peer broke a rule that all streams depend on: a connection error (5.4.1)."""

    def __init__(self, code: int, detail: str) -> None:
        """`code`: of the GOAWAY frame (7)."""
        super().__init__(detail)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a whole frame."""
    return FRAME.pack(len(payload) << 8 | kind, flags, stream) + payload


def header_frames(stream: int, flags: int, block: bytes) -> list[bytes]:
    """Return a header block in as many frames as it takes (4.3). `flags`: END_STREAM or 0."""
    frames, kind = [], HEADERS
    while len(block) > MAX_FRAME_BYTES:
        frames.append(frame(kind, flags, stream, block[:MAX_FRAME_BYTES]))
        kind, flags, block = CONTINUATION, 0, block[MAX_FRAME_BYTES:]
    frames.append(frame(kind, flags | END_HEADERS, stream, block))
    return frames


def uint32(payload: bytes) -> int:
    """Read a payload that is one number of 32 bits; raises ConnectionFault where it is longer or shorter."""
    if len(payload) != 4:
        raise ConnectionFault(FRAME_SIZE_ERROR, "a frame is not 4 bytes long, as its kind is")
    return int.from_bytes(payload, "big")


def without_padding(payload: bytes) -> bytes:
    """Take the padding off a payload whose frame is PADDED (6.1); raises ConnectionFault."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(PROTOCOL_ERROR, "a frame has more padding than payload")
    return payload[1 : len(payload) - payload[0]]


class FrameReader:
    """Cuts one peer's bytes into frames; a HEADERS frame and its CONTINUATION frames come out as one."""

    __slots__ = ("_block", "_buffer", "_max_block_bytes", "has_settings")

    def __init__(self, max_block_bytes: int) -> None:
        """`max_block_bytes`: of a header block in several frames, as it was sent."""
        self._max_block_bytes = max_block_bytes
        self._buffer = b""
        self.has_settings = False
        """The peer's SETTINGS have come, as they must before any other frame (3.4)."""
        self._block: tuple[int, int, bytearray] | None = None
        """A header block that is not whole: its stream, the flags of its HEADERS frame, and what has come."""

    def read(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield kind, flags, stream and payload of each frame that is whole now. The caller takes them all before it
        reads again. Raises ConnectionFault, after which nothing can be read.
        """
        data = self._buffer + data if self._buffer else data
        at, end = 0, len(data)
        while end - at >= FRAME_HEADER_BYTES:
            head, flags, stream = FRAME.unpack_from(data, at)
            if head >> 8 > MAX_FRAME_BYTES:
                raise ConnectionFault(FRAME_SIZE_ERROR, "a frame is larger than SETTINGS_MAX_FRAME_SIZE")
            stop = at + FRAME_HEADER_BYTES + (head >> 8)
            if stop > end:
                break
            kind, stream, payload = head & 0xFF, stream & LARGEST_WINDOW, data[at + FRAME_HEADER_BYTES : stop]
            at = stop
            if not self.has_settings:
                if kind != SETTINGS:
                    raise ConnectionFault(PROTOCOL_ERROR, "the first frame is no SETTINGS frame")
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
                raise ConnectionFault(PROTOCOL_ERROR, "a CONTINUATION frame continues nothing")
            if stream == 0:
                raise ConnectionFault(PROTOCOL_ERROR, "a HEADERS frame names no stream")
            fragment = _header_fragment(flags, stream, payload)
            if flags & END_HEADERS:
                return HEADERS, flags, stream, fragment
            self._block = (stream, flags, bytearray(fragment))
            return None
        first, first_flags, block = self._block
        if kind != CONTINUATION or first != stream:
            raise ConnectionFault(PROTOCOL_ERROR, "a frame came in the midst of a header block")
        # Empty ones cost the peer next to nothing, and there could be any number (CVE-2024-27316).
        if not payload and not flags & END_HEADERS:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "a CONTINUATION frame is empty")
        block += payload
        if len(block) > self._max_block_bytes:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "a header block does not end")
        if not flags & END_HEADERS:
            return None
        self._block = None
        return HEADERS, first_flags, stream, bytes(block)


def _header_fragment(flags: int, stream: int, payload: bytes) -> bytes:
    """Take padding and priority off the payload of a HEADERS frame (6.2); raises ConnectionFault."""
    block = without_padding(payload) if flags & PADDED else payload
    if flags & HAS_PRIORITY:
        if len(block) < 5:
            raise ConnectionFault(FRAME_SIZE_ERROR, "a HEADERS frame is too short for its priority")
        if uint32(block[:4]) & LARGEST_WINDOW == stream:
            raise ConnectionFault(PROTOCOL_ERROR, "a stream depends on itself")
        block = block[5:]
    return block

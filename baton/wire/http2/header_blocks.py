"""Header blocks as HTTP/2 compresses them (HPACK, RFC 7541): a bounded reader, and a writer that uses no tables.

The tables and Huffman's code are the `hpack` package's. Its `Decoder` is not used: it can only end the connection when
a list is too large, while gRPC answers that one call and goes on (`tests/unit/wire/test_http2_headers.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hpack import HPACKDecodingError, InvalidTableIndexError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

Header = tuple[str, str]

TABLE_BYTES = HeaderTable.DEFAULT_SIZE
_MAX_RESIZES = 2
"""Limit of the size updates of the table in one block: to the smallest size and to the last one (RFC 7541, 4.2)."""
_BOMB_LISTS, _BOMB_EXPANSION = 8, 10
"""A header list ends the connection if it is 8 times larger than its limit, and 10 times larger than its block."""
_ENTRY_BYTES = 32
"""Bytes that are added to the size of each header (RFC 7541, 4.1)."""
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+")
_CONTENT_LENGTH = re.compile(r"[0-9]{1,18}")
_FORBIDDEN_IN_VALUE = re.compile(r"[\0\r\n]|\A[ \t]|[ \t]\Z")
"""Characters that a value must not have: anywhere, as its first one, as its last one (8.2.1)."""
_CONNECTION_SPECIFIC = frozenset({"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"})
"""Fields of HTTP/1.1 that speak of the connection (8.2.2)."""
_REQUIRED_PSEUDO = frozenset({":method", ":scheme", ":path"})
_ALL_PSEUDO = _REQUIRED_PSEUDO | {":authority"}


class BrokenHeaders(ValueError):
    """Bytes are not a header block. The connection can't continue, since its table may be wrong now."""


class HeaderReader:
    """Reads the header blocks of one connection, in the order in which they come.

    The blocks come from unknown peers, and one byte may stand for four thousand. Therefore the decoded size of a list
    is limited.
    """

    __slots__ = ("_max_list_bytes", "_table")

    def __init__(self, max_list_bytes: int) -> None:
        """`max_list_bytes`: limit of one list, with 32 bytes for each header (SETTINGS_MAX_HEADER_LIST_SIZE)."""
        self._max_list_bytes = max_list_bytes
        self._table: HeaderTable | None = None
        """The HPACK table; None before the first header. It takes a kilobyte, and most connections may be silent."""

    def read(self, block: bytes) -> list[Header] | None:
        """Return the headers, decoded as latin-1; None where they are too many or too large. Raises BrokenHeaders."""
        try:
            return self._read(block)
        except IndexError:
            raise BrokenHeaders("a header block ends too early") from None
        except InvalidTableIndexError as error:
            raise BrokenHeaders(f"a header is not in the table: {error}") from None
        except HPACKDecodingError as error:
            raise BrokenHeaders(str(error)) from None

    def _read(self, block: bytes) -> list[Header] | None:
        table = self._table
        if table is None:
            table = self._table = HeaderTable()
        headers: list[Header] = []
        left, at, end = self._max_list_bytes, 0, len(block)
        bomb_bytes = max(_BOMB_LISTS * self._max_list_bytes, _BOMB_EXPANSION * end)
        num_resizes = 0
        while at < end:
            first = block[at]
            if first & 0x80:  # an indexed header (6.1)
                index, at = _integer(block, at, 7)
                name, value = table.get_by_index(index)
            elif first & 0xE0 == 0x20:  # a new size of the table (6.3)
                num_resizes += 1
                if num_resizes > _MAX_RESIZES or left < self._max_list_bytes:
                    raise BrokenHeaders("the table's size changes behind a header, or again and again")
                size, at = _integer(block, at, 5)
                if size > TABLE_BYTES:
                    raise BrokenHeaders("the table would be larger than it may be")
                table.maxsize = size
                continue
            else:  # a literal header (6.2), added to the table or not
                index, at = _integer(block, at, 6 if first & 0x40 else 4)
                if index:
                    name = table.get_by_index(index)[0]
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                if first & 0x40:
                    table.add(name, value)
            left -= len(name) + len(value) + _ENTRY_BYTES
            if left >= 0:
                headers.append((name.decode("latin-1"), value.decode("latin-1")))
            elif self._max_list_bytes - left > bomb_bytes:
                raise BrokenHeaders("the headers are many times larger than they may be")
        return headers if left >= 0 else None


def _integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    """Read an integer (5.1); return it and where it ends. Raises IndexError where the block ends first."""
    most = (1 << prefix_bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for shift in range(0, 28, 7):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
    raise BrokenHeaders("an integer is too large")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """Read a string (5.2); return it and where it ends. Raises IndexError where the block ends first."""
    is_huffman = block[at] & 0x80
    length, at = _integer(block, at, 7)
    data = block[at : at + length]
    if len(data) < length:
        raise IndexError
    return decode_huffman(data) if is_huffman else data, at + length


def write_headers(headers: Iterable[Header]) -> bytes:
    """Write a header block of literals without indexing (6.2.2). Names are in small letters, both in latin-1."""
    return b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers)


def _literal(text: str) -> bytes:
    data = text.encode("latin-1")
    length = len(data)
    if length < 0x7F:
        return bytes((length,)) + data
    length -= 0x7F
    prefix = bytearray((0x7F,))
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + data


def is_request(headers: Sequence[Header]) -> bool:
    """Whether this header list may open a request (8.3.1)."""
    pseudo: dict[str, str] = {}
    for name, value in headers:
        if name[:1] != ":":
            break
        if name not in _ALL_PSEUDO or name in pseudo or _FORBIDDEN_IN_VALUE.search(value) is not None:
            return False
        pseudo[name] = value
    rest = headers[len(pseudo) :]
    if not (pseudo.keys() >= _REQUIRED_PSEUDO and pseudo[":path"] and are_plain(rest)):
        return False
    return len({value for name, value in rest if name == "content-length"}) <= 1


def are_plain(headers: Sequence[Header]) -> bool:
    """Whether this header list has no pseudo-header and no malformed field, as trailers must not (8.1)."""
    return all(map(_is_plain, headers))


def _is_plain(header: Header) -> bool:
    name, value = header
    if _NAME.fullmatch(name) is None or _FORBIDDEN_IN_VALUE.search(value) is not None or name in _CONNECTION_SPECIFIC:
        return False
    if name == "te":
        return value == "trailers"
    return name != "content-length" or _CONTENT_LENGTH.fullmatch(value) is not None


def content_length(headers: Sequence[Header]) -> int | None:
    """Return the length of the body that a request announces, in bytes; None if it announces none."""
    return next((int(value) for name, value in headers if name == "content-length"), None)

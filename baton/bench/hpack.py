"""Headers of an HTTP/2 answer (RFC 7541), for a client that has told its server to keep no table of them.

Strings in Huffman's code are not read: gRPC servers send none.
"""

from __future__ import annotations

_STATIC = (
    *(":authority", ":method", ":method", ":path", ":path", ":scheme", ":scheme", ":status", ":status", ":status"),
    *(":status", ":status", ":status", ":status", "accept-charset", "accept-encoding", "accept-language"),
    *("accept-ranges", "accept", "access-control-allow-origin", "age", "allow", "authorization", "cache-control"),
    *("content-disposition", "content-encoding", "content-language", "content-length", "content-location"),
    *("content-range", "content-type", "cookie", "date", "etag", "expect", "expires", "from", "host", "if-match"),
    *("if-modified-since", "if-none-match", "if-range", "if-unmodified-since", "last-modified", "link", "location"),
    *("max-forwards", "proxy-authenticate", "proxy-authorization", "range", "referer", "refresh", "retry-after"),
    *("server", "set-cookie", "strict-transport-security", "transfer-encoding", "user-agent", "vary", "via"),
    "www-authenticate",
)
"""Names alone: whole fields of the table are only those of requests, and statuses."""
_STATUSES = {8: "200", 9: "204", 10: "206", 11: "304", 12: "400", 13: "404", 14: "500"}


class BrokenHeaders(ValueError):
    """Bytes that are no headers, or none that this client can read."""


def read_headers(block: bytes) -> dict[str, str]:
    """Names and values; raises BrokenHeaders."""
    headers: dict[str, str] = {}
    at = 0
    try:
        while at < len(block):
            first = block[at]
            if first & 0x80:  # name and value from the table
                index, at = _number(block, at, 7)
                headers[_name(index)] = _STATUSES.get(index, "")
            elif first & 0xE0 == 0x20:  # the table's new size
                _, at = _number(block, at, 5)
            else:
                index, at = _number(block, at, 6 if first & 0x40 else 4)
                if index:
                    name = _name(index)
                else:
                    name, at = _string(block, at)
                headers[name], at = _string(block, at)
    except IndexError:
        raise BrokenHeaders("they end too early") from None
    return headers


def _name(index: int) -> str:
    if not 1 <= index <= len(_STATIC):
        raise BrokenHeaders(f"field {index} of a table that was to be empty")
    return _STATIC[index - 1]


def _number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    shift = 0
    while value >= most:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 28:
            raise BrokenHeaders("a number is too large")
    return value, at


def _string(block: bytes, at: int) -> tuple[str, int]:
    is_huffman = block[at] & 0x80
    length, at = _number(block, at, 7)
    if at + length > len(block):
        raise BrokenHeaders("they end too early")
    text = "" if is_huffman else block[at : at + length].decode("utf-8", "replace")
    return text, at + length

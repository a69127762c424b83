"""What a request's headers must be before anybody looks at what they say (RFC 9113, 8.2 and 8.3)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton.wire.http2.header_blocks import Header

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+")
_LENGTH = re.compile(r"[0-9]{1,18}")
_FORBIDDEN = re.compile(r"[\0\r\n]|\A[ \t]|[ \t]\Z")
"""Of a value (RFC 9113, 8.2.1): anywhere, as its first character, as its last one."""
_OF_HTTP1 = frozenset({"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"})
"""They spoke of the connection, which here is not the request's own."""
_NEEDED = frozenset({":method", ":scheme", ":path"})
_PSEUDO = _NEEDED | {":authority"}


def is_request(headers: Sequence[Header]) -> bool:
    """Whether these open a request."""
    pseudo: dict[str, str] = {}
    for name, value in headers:
        if name[:1] != ":":
            break
        if name not in _PSEUDO or name in pseudo or _FORBIDDEN.search(value) is not None:
            return False
        pseudo[name] = value
    rest = headers[len(pseudo) :]
    if not (pseudo.keys() >= _NEEDED and pseudo[":path"] and are_plain(rest)):
        return False
    return len({value for name, value in rest if name == "content-length"}) <= 1


def are_plain(headers: Sequence[Header]) -> bool:
    """Whether these are fields of their own, as trailers must be."""
    return all(map(_is_plain, headers))


def _is_plain(header: Header) -> bool:
    name, value = header
    if _NAME.fullmatch(name) is None or _FORBIDDEN.search(value) is not None or name in _OF_HTTP1:
        return False
    if name == "te":
        return value == "trailers"
    return name != "content-length" or _LENGTH.fullmatch(value) is not None


def announced_bytes(headers: Sequence[Header]) -> int | None:
    """How long a request's body is to be; None if it does not say."""
    return next((int(value) for name, value in headers if name == "content-length"), None)

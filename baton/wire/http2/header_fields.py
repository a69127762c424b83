"""Checks that a header list may open a request, or be its trailers (RFC 9113, 8.2 and 8.3)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton.wire.http2.header_blocks import Header

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+")
_CONTENT_LENGTH = re.compile(r"[0-9]{1,18}")
_FORBIDDEN_IN_VALUE = re.compile(r"[\0\r\n]|\A[ \t]|[ \t]\Z")
"""Characters that a value must not have: anywhere, as its first one, as its last one (8.2.1)."""
_CONNECTION_SPECIFIC = frozenset({"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"})
"""Fields of HTTP/1.1 that speak of the connection (8.2.2)."""
_REQUIRED_PSEUDO = frozenset({":method", ":scheme", ":path"})
_ALL_PSEUDO = _REQUIRED_PSEUDO | {":authority"}


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

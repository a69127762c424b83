"""The headers of gRPC calls (gRPC's PROTOCOL-HTTP2.md): what a call's say, and the blocks of those that answer it."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

import grpc

from baton.security.matrix import Caller
from baton.wire.http2.header_blocks import Header, write_headers

Metadatum = tuple[str, str | bytes]

RESPONSE_HEADERS = write_headers(((":status", "200"), ("content-type", "application/grpc")))
_OK_TRAILERS = write_headers((("grpc-status", "0"),))
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])\Z")
_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_RESERVED = frozenset({"te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"})


class CallDetails(NamedTuple):
    """The properties of a call that interceptors and handlers can see (`grpc.HandlerCallDetails`)."""

    method: str
    invocation_metadata: Sequence[Metadatum]
    caller: Caller | None = None
    """The caller; None if the server has not authenticated it when the headers came."""


class CallRefused(Exception):
    """A call ends with this status, whatever its handler would answer."""

    def __init__(self, code: grpc.StatusCode, detail: str, trailing: Sequence[Metadatum] = ()) -> None:
        """`trailing`: the trailing metadata of the answer."""
        super().__init__(detail)
        self.code = code
        self.trailing = trailing


class CallHead(NamedTuple):
    """The content of a call's headers."""

    details: CallDetails
    is_gzip: bool
    timeout_s: float | None

    @classmethod
    def read(cls, headers: Sequence[Header]) -> CallHead:
        """Parse a header list; raises CallRefused if it begins no gRPC call."""
        fields = dict(headers)
        details = CallDetails(_method(fields), metadata_of(headers))
        is_gzip = fields.get("grpc-encoding", "identity") == "gzip"
        return cls(details, is_gzip, _timeout_s(fields.get("grpc-timeout")))

    def with_caller(self, caller: Caller) -> CallHead:
        """Return a copy that names the authenticated caller."""
        return self._replace(details=self.details._replace(caller=caller))


def _method(fields: Mapping[str, str]) -> str:
    if fields.get(":method") != "POST" or not fields.get("content-type", "").startswith("application/grpc"):
        raise CallRefused(grpc.StatusCode.INTERNAL, "no gRPC call: that is a POST with content-type application/grpc")
    return fields.get(":path", "")


def metadata_of(headers: Sequence[Header]) -> Sequence[Metadatum]:
    """Return the metadata of a call: all headers but those of HTTP/2 and gRPC itself. Raises CallRefused."""
    return tuple(
        (name, _from_base64(value) if name.endswith("-bin") else value)
        for name, value in headers
        if name[:1] != ":" and name not in _RESERVED
    )


def _from_base64(value: str) -> bytes:
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise CallRefused(grpc.StatusCode.INTERNAL, "metadata with a name that ends in -bin is not base64") from None


def metadata_block(metadata: Iterable[Metadatum]) -> bytes:
    """Return the headers of metadata."""
    return write_headers((key.lower(), _value(value)) for key, value in metadata or ())


def _value(value: str | bytes) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).rstrip(b"=").decode("ascii")
    if value.isascii() and value.isprintable():
        return value
    return "".join(letter if " " <= letter <= "~" else "?" for letter in value)


def _timeout_s(text: str | None) -> float | None:
    if text is None:
        return None
    found = _TIMEOUT.match(text)
    if found is None:
        raise CallRefused(grpc.StatusCode.INTERNAL, "the header grpc-timeout is malformed")
    return int(found[1]) * _UNITS_S[found[2]]


def trailers_only(refusal: CallRefused) -> bytes:
    """Return the header block that is the whole answer to a refused call ("Trailers-Only")."""
    return RESPONSE_HEADERS + status_block(refusal.code, str(refusal)) + metadata_block(refusal.trailing)


def status_block(code: grpc.StatusCode, detail: str) -> bytes:
    """Return the headers of a call's end."""
    if code is grpc.StatusCode.OK:
        return _OK_TRAILERS
    number: int = code.value[0]
    status = (("grpc-status", str(number)), ("grpc-message", quote(detail, safe=_PRINTABLE)))
    return write_headers(status)


_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")

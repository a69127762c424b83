"""Reads forms with a file (multipart/form-data, RFC 7578): parts, headers, fields and the file are bounded."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Scope

from baton.errors import InvalidRequest
from router.http.bodies.fields import NotServed, Strict
from router.http.errors import HttpError, Kind
from router.http.json_body import CLOSE

ResponseFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
Granularity = Literal["segment", "word"]


def _audio_file(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("must be the part of a form with the audio file")
    return value


def _temperature(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise ValueError("must be a number from 0 to 1")
    return number


def _switch(value: Any) -> bool:
    if value not in ("true", "false"):
        raise ValueError("must be true or false")
    return bool(value == "true")


def _granularities(value: Any) -> frozenset[Granularity]:
    if any(granularity not in ("segment", "word") for granularity in value):
        raise ValueError("must be segment or word")
    return frozenset(value)


class SpeechBody(Strict):
    """The fields of OpenAI's API for speech to text."""

    core_names = {"audio": ("file",)}  # noqa: RUF012

    file: Annotated[bytes, PlainValidator(_audio_file), WithJsonSchema({"type": "string", "format": "binary"})]
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: ResponseFormat = "json"
    temperature: Annotated[float, PlainValidator(_temperature, json_schema_input_type=float)] = 0.0
    stream: Annotated[bool, PlainValidator(_switch, json_schema_input_type=bool)] = False
    timestamp_granularities: Annotated[
        frozenset[Granularity], PlainValidator(_granularities, json_schema_input_type=list[str])
    ] = Field(frozenset(), alias="timestamp_granularities[]")
    chunking_strategy: Literal["auto"] | None = None
    """All audio is divided."""
    include: NotServed = Field(None, alias="include[]")


_FORM = b"multipart/form-data"
MORE_BYTES = 64 << 10
"""The most bytes of a body beside its file."""
FILE = "file"
"""The name of the part that is a file."""
_MAX_PARTS = 32
_MAX_FIELD_BYTES = 16 << 10
_MAX_HEADERS = 8
"""Headers of a part."""
_MAX_HEADER_BYTES = 1024
_MAX_BOUNDARY_BYTES = 70
"""RFC 2046, section 5.1.1."""
# The parser logs what is wrong with a form, which its sender is told.
logging.getLogger("python_multipart.multipart").setLevel(logging.ERROR)


def boundary_of(content_type: bytes) -> bytes:
    """What separates the parts of a form. Raises HttpError for a body of another type, or InvalidRequest."""
    kind, options = parse_options_header(content_type)
    if kind != _FORM:
        message = "content-type must be multipart/form-data (curl: -F file=@speech.wav)"
        raise HttpError(Kind(415, "invalid_request_error", "unsupported_media_type"), message)
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= _MAX_BOUNDARY_BYTES:
        raise InvalidRequest("content-type", f"must have a boundary of 1 to {_MAX_BOUNDARY_BYTES} bytes")
    return bytes(boundary)


def check_origin(scope: Scope, origins: Sequence[str]) -> None:
    """Raises HttpError for a form from a page of another origin than the router's, or `origins` (`*`: any).

    Browsers ask before they send JSON to another origin, but not before they send a form.
    """
    headers = dict(scope["headers"])
    origin = headers.get(b"origin")
    if origin is None or "*" in origins or origin.decode("latin-1") in origins:
        return
    if origin.partition(b"://")[2] != headers.get(b"host", b""):
        message = f"pages of {origin[:80].decode('latin-1')} may not send forms here; --cors-origins permits it"
        raise HttpError(Kind(403, "permission_error", "permission_denied"), message, [CLOSE])


def read_form(boundary: bytes, body: bytes) -> dict[str, Any]:
    """The fields of a form: texts, lists of texts where the name ends in `[]`, and the bytes of the part `file`.

    Raises InvalidRequest. May be called in a thread.
    """
    form = _Form()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": form.begin_part,
            "on_header_field": form.add_to_name,
            "on_header_value": form.add_to_value,
            "on_header_end": form.end_header,
            "on_headers_finished": form.end_headers,
            "on_part_data": form.add_data,
            "on_part_end": form.end_part,
            "on_end": form.end,
        },
        max_header_count=_MAX_HEADERS,
        max_header_size=_MAX_HEADER_BYTES,
    )
    try:
        parser.write(body)
    except FormParserError as error:
        raise InvalidRequest("body", f"is not multipart/form-data: {str(error)[:200]}") from None
    if not form.is_over:
        raise InvalidRequest("body", "ends before the last boundary of the form")
    return form.fields


class _Form:
    """What was read of a form."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.is_over = False
        self._num_parts = 0
        self._header = bytearray()
        self._value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._data = bytearray()

    def begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise InvalidRequest("body", f"has more than {_MAX_PARTS} parts")
        self._headers = {}
        self._data = bytearray()

    def add_to_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def end_header(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def end_headers(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or not options.get(b"name"):
            raise InvalidRequest("body", "has a part without a name (content-disposition: form-data; name=...)")
        self._name = _text("body", options[b"name"])
        if self._name in self.fields and not self._name.endswith("[]"):
            raise InvalidRequest(self._name[:80], "is there twice")

    def add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name != FILE and len(self._data) + end - start > _MAX_FIELD_BYTES:
            raise InvalidRequest(self._name[:80], f"has more than {_MAX_FIELD_BYTES} bytes")
        self._data += memoryview(data)[start:end]

    def end_part(self) -> None:
        if self._name == FILE:
            self.fields[FILE] = bytes(self._data)
        elif self._name.endswith("[]"):
            self.fields.setdefault(self._name, []).append(_text(self._name[:80], self._data))
        else:
            self.fields[self._name] = _text(self._name[:80], self._data)
        self._data = bytearray()

    def end(self) -> None:
        self.is_over = True


def _text(field: str, data: bytes | bytearray) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(field, "is not valid UTF-8") from None

"""Reads the JSON of a request: its size is bounded while it arrives, and what parsers read differently is refused."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Never

import numpy as np
from starlette.types import Receive, Scope

from baton.errors import BatonError, InvalidRequest, QueueFull
from baton.messages.request_limits import (
    MAX_BODY_CONTAINERS,
    MAX_BODY_DEPTH,
    MAX_BODY_FIELDS,
    MAX_BODY_STRINGS,
    MAX_BODY_VALUES,
    MAX_REQUEST_BYTES,
)
from router.http.errors import HttpError, Kind

MAX_BODY_BYTES = MAX_REQUEST_BYTES
MAX_LARGE_BODIES = 8
"""The most bodies above that size that are read or parsed at once, where there may be any."""
MAX_HEADER_BYTES = 8 << 10
_SMALL_BYTES = 16 << 10
_SMALL_CONTAINERS = 256
"""Bodies with at most so many bytes and brackets are handled on the event loop, others in a thread."""
_ARRIVAL_S = 60.0
"""How long a body may take to arrive."""
_PATIENCE_S = 5.0
"""For so long a large body may stop, whoever waits, however much of it came before."""
_SLOW_BYTES_PER_S = 256 << 10
"""A large body that comes more slowly gives way to another one, if there are too many."""

quote: Callable[[str], str] = json.JSONEncoder(ensure_ascii=False).encode
"""A string as JSON; much quicker than `json.dumps` with the same setting."""
CLOSE = (b"connection", b"close")
_READ_TO_ITS_END = "body_is_read"


class ClientGone(Exception):
    """The client left before its request had arrived, so there is no one to answer."""


class LargeBody:
    """The place of one body among the large ones, which it takes once it is seen to be one."""

    def __init__(self, bodies: LargeBodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0
        self._give_up: Callable[[], object] | None = None
        """Ends the reading of the body; None: it is not arriving."""
        self.slow_from = math.inf
        """From when on it is slow, unless more of it comes before; infinite while it is not arriving."""

    @contextmanager
    def arriving(self, give_up: Callable[[], object]) -> Iterator[None]:
        """The body arrives meanwhile, or what it names. `give_up` is called if others need its place more."""
        self.slow_from, self._give_up = self._bodies.now() + _PATIENCE_S, give_up
        self._num_bytes = 0
        try:
            yield
        finally:
            self.slow_from, self._give_up = math.inf, None

    def came(self, num_bytes: int) -> None:
        """So many bytes of what arrives are there. Raises QueueFull if it is a large one too many.

        Only by bytes it becomes a large body, so that nobody has a place by announcing one, and sending nothing.
        """
        now = self._bodies.now()
        paid_for = max(self.slow_from, now) + (num_bytes - self._num_bytes) / _SLOW_BYTES_PER_S
        self.slow_from = min(paid_for, now + _PATIENCE_S)
        self._num_bytes = num_bytes
        if num_bytes > MAX_BODY_BYTES:
            self.take()

    def take(self) -> None:
        """Be one of the large bodies. Raises QueueFull if there are too many. Idempotent."""
        self._bodies.add(self)

    def release(self) -> None:
        """The body and its JSON are needed no more. Idempotent."""
        self._bodies.remove(self)

    def give_way(self) -> None:
        """Leave the place to another body, and end the reading of this one."""
        if self._give_up is not None:
            self._give_up()
        self.release()


class LargeBodies:
    """The bodies above MAX_BODY_BYTES that are being read or parsed, each several times in memory.

    They are few. If all places are taken, one that arrives slowly gives way to the next one: otherwise some clients
    that send on and on would keep all others from sending anything large.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        *,
        most: int = MAX_LARGE_BODIES,
        kind: str = f"bodies above {MAX_BODY_BYTES} bytes are being read",
    ) -> None:
        """`now`: seconds on a clock. `most`: the number of places; `kind`: what is said of them if they are taken."""
        self.now = now
        self._most = most
        self._kind = kind
        self._open: list[LargeBody] = []

    @property
    def num_open(self) -> int:
        """The number of places that are taken."""
        return len(self._open)

    def add(self, body: LargeBody) -> None:
        """Give a body a place. Raises QueueFull if there are too many. Idempotent."""
        if body in self._open:
            return
        if len(self._open) >= self._most:
            slowest = min(self._open, key=lambda upload: upload.slow_from)
            if slowest.slow_from > self.now():
                raise QueueFull(f"{len(self._open)} {self._kind}")
            slowest.give_way()
        self._open.append(body)

    def remove(self, body: LargeBody) -> None:
        """Take the place of a body back. Idempotent."""
        if body in self._open:
            self._open.remove(body)

    @contextmanager
    def place(self) -> Iterator[LargeBody]:
        """The place of a body that may be large; released at the end, if not before."""
        body = LargeBody(self)
        try:
            yield body
        finally:
            body.release()


async def read_body(
    scope: Scope,
    receive: Receive,
    most: int = MAX_BODY_BYTES,
    large: LargeBody | None = None,
    *,
    is_json: bool = True,
) -> bytes:
    """Read the whole body, of `most` bytes; `large`: its place, if that is above MAX_BODY_BYTES. `is_json`: whether it
    must be declared as JSON.

    Raises HttpError if it is too long or not declared as JSON, QueueFull for one large body too many, or ClientGone.
    """
    headers = dict(scope["headers"])
    if is_json:
        _check_content_type(headers.get(b"content-type", b""))
    if int(headers.get(b"content-length") or 0) > most:
        raise _too_long(most)
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with asyncio.timeout(_ARRIVAL_S) as due:

            def give_up() -> None:
                if not due.expired():
                    due.reschedule(loop.time())

            with nullcontext() if large is None else large.arriving(give_up):
                content = await _read(receive, most, large)
            scope["state"][_READ_TO_ITS_END] = True
            return content
    except TimeoutError:
        message = f"the body did not come within {_ARRIVAL_S:g} s"
        if loop.time() < began + _ARRIVAL_S:
            message = f"the body came too slowly while others waited: send {_SLOW_BYTES_PER_S >> 10} KiB/s at least"
        raise HttpError(Kind(408, "timeout_error", "request_timeout"), message, [CLOSE]) from None


async def _read(receive: Receive, most: int, large: LargeBody | None) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > most:
            raise _too_long(most)
        if large is not None:
            large.came(len(body))
        if not message.get("more_body", False):
            return bytes(body)


def base64_bytes(num_bytes: int) -> int:
    """The length of so many bytes in base64."""
    return -(-num_bytes // 3) * 4


def is_unread(scope: Scope) -> bool:
    """Whether there is a body that was not read to its end, so that the connection can't be used again."""
    headers = dict(scope["headers"])
    has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""
    return has_body and not scope.get("state", {}).get(_READ_TO_ITS_END, False)


def check_headers(scope: Scope) -> None:
    """Raises HttpError if the headers are too long."""
    num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    if num_bytes > MAX_HEADER_BYTES:
        message = f"the headers have {num_bytes} bytes; at most {MAX_HEADER_BYTES} are taken"
        raise HttpError(Kind(431, "invalid_request_error", "headers_too_large"), message, [CLOSE])


def is_small(body: bytes, more_bytes: int = 0) -> bool:
    """Whether a body is parsed, checked and tokenized within a few milliseconds, and so on the event loop.

    `more_bytes`: what the request has beside its body.
    """
    return len(body) + more_bytes <= _SMALL_BYTES and body.count(b"[") + body.count(b"{") <= _SMALL_CONTAINERS


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; raises InvalidRequest that says what is wrong with it."""
    if len(body) > _SMALL_BYTES:
        _check_counts(body)
    try:
        value = json.loads(
            body.decode(), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_float=_finite
        )
    except UnicodeDecodeError:
        raise InvalidRequest("body", "is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        # An integer with more digits than Python reads.
        raise InvalidRequest("body", "has a number that is too long") from None
    if not isinstance(value, dict):
        raise InvalidRequest("body", "must be a JSON object")
    if len(value) > MAX_BODY_FIELDS:
        raise InvalidRequest("body", f"has {len(value)} fields; at most {MAX_BODY_FIELDS} are taken")
    if body.count(b"[") + body.count(b"{") > MAX_BODY_DEPTH:
        _check_depth(value)
    return value


def _check_counts(body: bytes) -> None:
    """Check the numbers of values before parsing: a megabyte of brackets becomes 350,000 lists, for which Python needs
    a third of a second and runs nothing else meanwhile.

    No object is made for a string: a collection of garbage, which holds the event loop, would look at each of them.
    """
    letters = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    is_quote = letters == ord('"')
    _check_count("strings", int(is_quote.sum()) // 2, MAX_BODY_STRINGS)
    outside = letters[~np.logical_xor.accumulate(is_quote)].tobytes()
    _check_count("objects and arrays", outside.count(b"[") + outside.count(b"{"), MAX_BODY_CONTAINERS)
    _check_count("values", outside.count(b","), MAX_BODY_VALUES)


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest("body", f"has {count} {what}; at most {most} are taken")


def _check_content_type(content_type: bytes) -> None:
    # Otherwise a form on any web page could send requests here, since browsers do not ask before they send a form.
    kind = content_type.partition(b";")[0].strip().lower()
    if kind != b"application/json":
        message = "content-type must be application/json (curl: -H 'content-type: application/json', or --json)"
        raise HttpError(Kind(415, "invalid_request_error", "unsupported_media_type"), message)


def _too_long(most: int) -> BatonError:
    message = f"the body has more than the {most} bytes that are taken"
    return HttpError(Kind(413, "invalid_request_error", "body_too_large"), message, [CLOSE])


def _too_deep() -> InvalidRequest:
    return InvalidRequest("body", f"is nested deeper than {MAX_BODY_DEPTH}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InvalidRequest(twice[:80], "is there twice")
    return unique


def _refuse_constant(name: str) -> Never:
    raise InvalidRequest("body", f"is not JSON: {name} is no number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise InvalidRequest("body", f"has a number that is too large: {digits[:32]}")
    return value


def _check_depth(body: Mapping[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_BODY_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise _too_deep()


def _children(value: Any) -> list[Any]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inside if isinstance(child, dict | list)]

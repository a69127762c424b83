"""One call of a gRPC client (gRPC's PROTOCOL-HTTP2.md): its request, and the context by which its handler answers."""

from __future__ import annotations

import asyncio
import base64
import binascii
import inspect
import logging
import re
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, NoReturn, Protocol
from urllib.parse import quote

import grpc

from baton.security.callers import Caller, current_caller
from baton.wire.http2.header_blocks import Header, write_headers

_log = logging.getLogger(__name__)

Metadatum = tuple[str, str | bytes]

_MESSAGE = struct.Struct(">BI")
"""Whether it is compressed, and its length."""
_BEGIN = write_headers(((":status", "200"), ("content-type", "application/grpc")))
_OK = write_headers((("grpc-status", "0"),))
_LATE = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])\Z")
_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
STALL_S = 60.0
"""How long a write may wait for its reader: for calls that nothing else watches over."""
IDLE_REQUEST_S = 300.0
"""How long a handler waits for the next message of a stream."""
_RESERVED = frozenset({"te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"})


class CallDetails(NamedTuple):
    """What interceptors and handlers see of a call; see `grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: Sequence[Metadatum]
    caller: Caller | None = None
    """Who calls, where the server has checked that when the headers came; None: nobody has."""


class HeldBytes:
    """How much of requests is held that nobody has read, of one connection or of all."""

    __slots__ = ("_whole", "value")

    def __init__(self, whole: HeldBytes | None = None) -> None:
        """`whole`: what this is a part of."""
        self.value = 0
        self._whole = whole

    def add(self, num_bytes: int) -> None:
        """Negative: that many are held no more."""
        self.value += num_bytes
        if self._whole is not None:
            self._whole.add(num_bytes)


class Link(Protocol):
    """What a call asks of its connection."""

    def send_headers(self, stream: int, block: bytes) -> None: ...

    def send(self, stream: int, data: bytes) -> bool:
        """False: it is to wait for `Call.go_on` before it sends more."""
        ...

    def has_room(self, stream: int) -> bool:
        """Whether it need not wait."""
        ...

    def finish(self, stream: int, block: bytes) -> None: ...

    def end(self, stream: int, block: bytes) -> None:
        """As `finish`, but what waits is not sent any more."""
        ...

    @property
    def peer(self) -> str: ...

    @property
    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...


class _Refusal(NamedTuple):
    """Why nothing more of a request is taken. No exception: one that has been raised refers to this call's frames, and
    a call that refers to it would be a cycle, which only the collector ends.
    """

    code: grpc.StatusCode
    story: str


class BadCall(Exception):
    """A call that is answered with this before any handler hears of it."""

    def __init__(self, code: grpc.StatusCode, story: str, trailing: Sequence[Metadatum] = ()) -> None:
        """`trailing`: metadata of the answer."""
        super().__init__(story)
        self.code = code
        self.trailing = trailing


class CallHead(NamedTuple):
    """What a call's headers say."""

    details: CallDetails
    is_gzip: bool
    timeout_s: float | None

    @classmethod
    def read(cls, headers: Sequence[Header]) -> CallHead:
        """Raises BadCall for headers that begin no call of gRPC."""
        fields = dict(headers)
        details = CallDetails(_method(fields), metadata_of(headers))
        is_gzip = fields.get("grpc-encoding", "identity") == "gzip"
        return cls(details, is_gzip, _timeout_s(fields.get("grpc-timeout")))

    def of(self, caller: Caller) -> CallHead:
        """With who it is that calls."""
        return self._replace(details=self.details._replace(caller=caller))


class Call(grpc.aio.ServicerContext[Any, Any]):
    """A call from its headers to its status. `serve` runs in a task of its own."""

    def __init__(
        self,
        link: Link,
        stream: int,
        head: CallHead,
        max_message_bytes: int,
        *,
        takes_stream: bool = True,
        held: HeldBytes | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        """`takes_stream`: its method takes any number of messages; else one, and it may begin once that is whole.
        `held`: counts what is held of the request. `stall_s`: how long a write may wait for its reader.
        """
        self._link = link
        self._stream = stream
        self._max_message_bytes = max_message_bytes
        self._takes_stream = takes_stream
        self._held = held or HeldBytes()
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self.about = head.details
        self._is_gzip = head.is_gzip
        self._buffer = bytearray()
        """Of the request: what has come and nobody has read, as it came. Messages are looked at one by one as they are
        read: a queue of them would be many times larger than what was sent.
        """
        self._is_ended = False
        self._refusal: _Refusal | None = None
        self._heard: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._serialize: Callable[[Any], bytes] = bytes
        self._has_begun = False
        self._is_over = False
        self._is_late = False
        self._trailing: Sequence[Metadatum] = ()
        self._code = grpc.StatusCode.OK
        self._story = ""
        self.task: asyncio.Task[None] | None = None
        self._deadline = None if head.timeout_s is None else self._loop.time() + head.timeout_s
        self._timer = None if self._deadline is None else self._loop.call_at(self._deadline, self._expire)

    @property
    def is_over(self) -> bool:
        """It was answered, or nobody wants it any more."""
        return self._is_over

    # What its connection says.

    def receive(self, data: bytes, *, is_ended: bool) -> None:
        """More of the request."""
        if self._refusal is None and not self._is_over:
            self._buffer += data
            self._held.add(len(data))
            try:
                self._check_bounds()
            except BadCall as fault:
                self.refuse(fault)
        self._is_ended = self._is_ended or is_ended
        self._tell()

    @property
    def may_begin(self) -> bool:
        """Its handler would have something to do: until a single message is whole, it would only wait for that."""
        return self._takes_stream or self._is_ended

    def refuse(self, fault: BadCall) -> None:
        """Nothing more of the request is taken. Once what was is read, this is raised; a call of one message ends."""
        self._refusal = _Refusal(fault.code, str(fault))
        if not self._takes_stream:
            self._drop_request()
            if self.task is None:
                self._finish(*self._refusal)
        self._tell()

    @property
    def num_held(self) -> int:
        """Bytes of the request that nobody has read yet."""
        return len(self._buffer)

    def _drop_request(self) -> None:
        self._held.add(-len(self._buffer))
        self._buffer.clear()

    def _tell(self) -> None:
        if self._heard is not None and not self._heard.done():
            self._heard.set_result(None)

    def go_on(self) -> None:
        """There is room for more."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def cancel(self) -> None:
        """The peer wants no answer any more, or is gone."""
        self._is_over = True
        self._drop_request()
        self._stop_timer()
        if self.task is not None:
            self.task.cancel()

    def stop(self, why: BadCall) -> None:
        """End it with this, whatever its handler would still say."""
        if not self._is_over:
            self._link.end(self._stream, _status(why.code, str(why)) if self._has_begun else trailers_only(why))
        self.cancel()

    # What its handler says; see `grpc.aio.ServicerContext`.

    async def write(self, message: Any) -> None:
        if not self.write_now(message) and not self._is_over:
            self._room = self._loop.create_future()
            late = self._loop.call_later(self._stall_s, self._stall)
            try:
                await self._room
            finally:
                late.cancel()
                self._room = None

    def _stall(self) -> None:
        story = f"nothing of the answer was read for {self._stall_s:g} s"
        self.stop(BadCall(grpc.StatusCode.RESOURCE_EXHAUSTED, story))

    @property
    def has_room(self) -> bool:
        """Whether a message would leave at once: for `write_now`."""
        return not self._is_over and self._link.has_room(self._stream)

    def write_now(self, message: Any) -> bool:
        """Write without waiting; False: there is no room for another one now. Not between `write` and its end."""
        data = self._serialize(message)
        self._begin()
        return self._link.send(self._stream, _MESSAGE.pack(0, len(data)) + data)

    async def read(self) -> Any:
        raise NotImplementedError("handlers iterate over requests")

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        self._begin(initial_metadata)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        self._trailing = tuple(trailing_metadata)
        self._finish(code, details)
        raise grpc.aio.AbortError("Locally aborted.")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailing = tuple(trailing_metadata)

    def invocation_metadata(self) -> Any:
        return self.about.invocation_metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._story = details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Nothing is compressed."""

    def disable_next_message_compression(self) -> None:
        """Nothing is compressed."""

    def peer(self) -> str:
        return self._link.peer

    def peer_identities(self) -> Any:
        return self.auth_context().get("peer_dns")

    def peer_identity_key(self) -> str | None:
        return "peer_dns" if self.auth_context() else None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return self._link.auth_context

    def time_remaining(self) -> Any:
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    # Its life.

    async def serve(self, find: Callable[[CallDetails], Any]) -> None:
        """Find the handler, give it the request, send what it says. For a task, which is cancelled by `cancel`."""
        if self.about.caller is not None:
            current_caller.set(self.about.caller)
        try:
            await self._answer(await find(self.about))
            self._finish(self._code, self._story)
        except BadCall as bad:
            self._finish(bad.code, str(bad))
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            # It ends here: a task keeps what ends it, which has this frame, which has the call, which has the task.
            self._finish(*(_LATE if self._is_late else (grpc.StatusCode.CANCELLED, "Cancelled")))
        except Exception as fault:
            _log.exception("%s failed", self.about.method)
            self._finish(grpc.StatusCode.UNKNOWN, f"Unexpected {type(fault)}: {fault}")
        finally:
            self._drop_request()
            self._stop_timer()
            self.task = None

    async def _answer(self, handler: Any) -> None:
        if handler is None:
            raise BadCall(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        self._serialize = handler.response_serializer or bytes
        read = handler.request_deserializer or bytes
        request = self._each(read) if handler.request_streaming else read(await self._only_request())
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if inspect.isasyncgenfunction(behaviour):
            async with aclosing(behaviour(request, self)) as responses:
                async for response in responses:
                    await self.write(response)
        else:
            response = await behaviour(request, self)
            if not handler.response_streaming:
                await self.write(response)

    async def _only_request(self) -> bytes:
        while not self._is_ended and self._refusal is None:
            await self._hear()
        if self._refusal is not None:
            raise BadCall(*self._refusal)
        request = self._next_request()
        if request is None and self._buffer:
            raise BadCall(grpc.StatusCode.INTERNAL, "the request's message is cut off")
        if request is None or self._buffer:
            raise _not_one_message()
        return request

    async def _each(self, read: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        while True:
            while (request := self._next_request()) is not None:
                yield read(request)
            if self._refusal is not None:
                raise BadCall(*self._refusal)
            if self._is_ended:
                return
            await self._hear()

    async def _hear(self) -> None:
        self._heard = self._loop.create_future()
        try:
            async with asyncio.timeout(IDLE_REQUEST_S):
                await self._heard
        except TimeoutError:
            story = f"nothing more of the request came for {IDLE_REQUEST_S:g} s"
            raise BadCall(grpc.StatusCode.DEADLINE_EXCEEDED, story) from None
        finally:
            self._heard = None

    def _check_bounds(self) -> None:
        """Raises BadCall for what is not to be held any longer."""
        num_bytes = len(self._buffer)
        if self._takes_stream:
            # One message that is not read yet, and one that is coming.
            if num_bytes > 2 * (self._max_message_bytes + _MESSAGE.size):
                raise BadCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "more requests than are read")
        elif num_bytes >= _MESSAGE.size and num_bytes > self._first_size() + _MESSAGE.size:
            raise _not_one_message()

    def _first_size(self) -> int:
        """Of the message that the buffer begins with; raises BadCall."""
        is_compressed, size = _MESSAGE.unpack_from(self._buffer)
        if size > self._max_message_bytes:
            raise self._too_large(size)
        if is_compressed and not self._is_gzip:
            raise BadCall(grpc.StatusCode.UNIMPLEMENTED, "requests may be compressed with gzip alone")
        return int(size)

    def _next_request(self) -> bytes | None:
        """None: none is whole. Raises BadCall."""
        buffer = self._buffer
        if len(buffer) < _MESSAGE.size:
            return None
        stop = _MESSAGE.size + self._first_size()
        if len(buffer) < stop:
            return None
        is_compressed, data = buffer[0], bytes(memoryview(buffer)[_MESSAGE.size : stop])
        del buffer[:stop]
        self._held.add(-stop)
        # Not before: what waits to be read is no larger than what was sent.
        return self._inflated(data) if is_compressed else data

    def _inflated(self, data: bytes) -> bytes:
        inflater = zlib.decompressobj(wbits=31)
        try:
            message = inflater.decompress(data, self._max_message_bytes + 1)
        except zlib.error as error:
            raise BadCall(grpc.StatusCode.INTERNAL, f"a message can't be decompressed: {error}") from error
        if len(message) > self._max_message_bytes:
            raise self._too_large(len(message))
        if not inflater.eof:
            raise BadCall(grpc.StatusCode.INTERNAL, "a compressed message is cut off")
        return message

    def _too_large(self, size: int) -> BadCall:
        story = f"Received message larger than max ({size} vs. {self._max_message_bytes})"
        return BadCall(grpc.StatusCode.RESOURCE_EXHAUSTED, story)

    def _begin(self, metadata: Iterable[Metadatum] = ()) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._link.send_headers(self._stream, _BEGIN + _written(metadata))

    def _finish(self, code: grpc.StatusCode, story: str) -> None:
        """Say how it ended; only the first time counts."""
        if self._is_over:
            return
        self._is_over = True
        self._stop_timer()
        first = b"" if self._has_begun else _BEGIN
        status = _OK if code is grpc.StatusCode.OK else _status(code, story)
        self._link.finish(self._stream, first + status + _written(self._trailing))

    def _expire(self) -> None:
        self._timer = None
        self._is_late = True
        if self.task is not None:
            self.task.cancel()
        else:
            self._finish(*_LATE)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def trailers_only(bad: BadCall) -> bytes:
    """The whole answer to a call that never began."""
    return _BEGIN + _status(bad.code, str(bad)) + _written(bad.trailing)


def _status(code: grpc.StatusCode, story: str) -> bytes:
    number: int = code.value[0]
    status = (("grpc-status", str(number)), ("grpc-message", quote(story, safe=_PRINTABLE)))
    return write_headers(status)


_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def _not_one_message() -> BadCall:
    """As gRPC's list of status codes has it for a method that requires exactly one request."""
    return BadCall(grpc.StatusCode.UNIMPLEMENTED, "a method of one message takes exactly one")


def _method(fields: Mapping[str, str]) -> str:
    if fields.get(":method") != "POST" or not fields.get("content-type", "").startswith("application/grpc"):
        raise BadCall(grpc.StatusCode.INTERNAL, "this is no call of gRPC")
    return fields.get(":path", "")


def metadata_of(headers: Sequence[Header]) -> Sequence[Metadatum]:
    """What the peer sent besides what gRPC needs; raises BadCall."""
    return tuple(
        (name, _from_base64(value) if name.endswith("-bin") else value)
        for name, value in headers
        if name[:1] != ":" and name not in _RESERVED
    )


def _from_base64(value: str) -> bytes:
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadCall(grpc.StatusCode.INTERNAL, "metadata that is not what its name says") from None


def _written(metadata: Iterable[Metadatum]) -> bytes:
    return write_headers((key.lower(), _value(value)) for key, value in metadata or ())


def _value(value: str | bytes) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).rstrip(b"=").decode("ascii")
    return "".join(letter if " " <= letter <= "~" else "?" for letter in value)


def _timeout_s(text: str | None) -> float | None:
    if text is None:
        return None
    found = _TIMEOUT.match(text)
    if found is None:
        raise BadCall(grpc.StatusCode.INTERNAL, "a timeout that is none")
    return int(found[1]) * _UNITS_S[found[2]]

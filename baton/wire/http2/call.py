"""One gRPC call at the server (gRPC's PROTOCOL-HTTP2.md): its request, and the context with which it is answered.

A third of it are short methods that grpcio's interface of a context prescribes.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, NoReturn, Protocol

import grpc

from baton.security.matrix import current_caller
from baton.wire.http2.call_headers import (
    RESPONSE_HEADERS,
    CallDetails,
    CallHead,
    CallRefused,
    Metadatum,
    metadata_block,
    status_block,
    trailers_only,
)

_log = logging.getLogger(__name__)

_MESSAGE_PREFIX = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its length."""
_DEADLINE_EXCEEDED = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
STALL_S = 60.0
"""Seconds that a write may wait for a client that reads nothing, before the call is ended."""
IDLE_REQUEST_S = 300.0
"""Seconds that a handler waits for the next message of a client's stream."""


class UnreadBytes:
    """Counts bytes of requests that were received and not read, of one connection or of all."""

    __slots__ = ("_whole", "value")

    def __init__(self, whole: UnreadBytes | None = None) -> None:
        """`whole`: the counter that also counts these bytes."""
        self.value = 0
        self._whole = whole

    def add(self, num_bytes: int) -> None:
        """Count more bytes; fewer, if negative."""
        self.value += num_bytes
        if self._whole is not None:
            self._whole.add(num_bytes)


class CallLink(Protocol):
    """The interface of a connection that its calls use. The first argument is the number of the call's stream."""

    def send_headers(self, stream: int, block: bytes) -> None: ...

    def send(self, stream: int, data: bytes) -> bool:
        """Send a part of the body. False: the caller waits for `Call.on_writable` before it sends more."""
        ...

    def has_room(self, stream: int) -> bool:
        """Whether `send` would return True."""
        ...

    def finish(self, stream: int, block: bytes) -> None: ...

    def end(self, stream: int, block: bytes) -> None:
        """As `finish`, but drop the part of the body that waits to be sent."""
        ...

    @property
    def peer(self) -> str: ...

    @property
    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...


class _Refusal(NamedTuple):
    """The reason why no more of a request is read.

    It is not an exception, because a raised exception refers to the frames of its call. A call that kept one would be
    in a reference cycle, which only the garbage collector ends.
    """

    code: grpc.StatusCode
    detail: str


class Call(grpc.aio.ServicerContext[Any, Any]):
    """A call from its headers to its status. `serve` runs in a task of its own."""

    def __init__(
        self,
        link: CallLink,
        stream: int,
        head: CallHead,
        max_message_bytes: int,
        *,
        takes_stream: bool = True,
        unread: UnreadBytes | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        """`takes_stream`: the method takes any number of messages; else one, and the call is ready once that is whole.
        `unread`: counts the bytes of the request that are not read. `stall_s`: see STALL_S.
        """
        self._link = link
        self._stream = stream
        self._max_message_bytes = max_message_bytes
        self._takes_stream = takes_stream
        self._unread = unread or UnreadBytes()
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self.call_details = head.details
        self._is_gzip = head.is_gzip
        self._buffer = bytearray()
        """The bytes of the request that came and are not read. Messages are cut off as they are read: a queue of small
        messages would take many times the memory of what was sent.
        """
        self._is_ended = False
        self._refusal: _Refusal | None = None
        self._request_arrival: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._serialize: Callable[[Any], bytes] = bytes
        self._has_begun = False
        self._is_over = False
        self._is_expired = False
        self._trailing: Sequence[Metadatum] = ()
        self._code = grpc.StatusCode.OK
        self._detail = ""
        self.task: asyncio.Task[None] | None = None
        self._deadline = None if head.timeout_s is None else self._loop.time() + head.timeout_s
        self._timer = None if self._deadline is None else self._loop.call_at(self._deadline, self._expire)

    @property
    def is_over(self) -> bool:
        """Whether the call was answered, or was cancelled."""
        return self._is_over

    # Called by the connection.

    def receive(self, data: bytes, *, is_ended: bool) -> None:
        """Take a part of the request's body. `is_ended`: nothing follows."""
        if self._refusal is None and not self._is_over:
            self._buffer += data
            self._unread.add(len(data))
            try:
                self._check_bounds()
            except CallRefused as fault:
                self.refuse(fault)
        self._is_ended = self._is_ended or is_ended
        self._wake_reader()

    @property
    def is_ready(self) -> bool:
        """Whether the handler has something to do: for one message, once that is whole."""
        return self._takes_stream or self._is_ended

    def refuse(self, fault: CallRefused) -> None:
        """Take nothing more of the request. The handler gets `fault` raised once it has read what came before; a call
        of one message ends at once.
        """
        self._refusal = _Refusal(fault.code, str(fault))
        if not self._takes_stream:
            self._drop_request()
            if self.task is None:
                self._finish(*self._refusal)
        self._wake_reader()

    @property
    def num_unread(self) -> int:
        """The number of bytes of the request that are not read yet."""
        return len(self._buffer)

    def _drop_request(self) -> None:
        self._unread.add(-len(self._buffer))
        self._buffer.clear()

    def _wake_reader(self) -> None:
        if self._request_arrival is not None and not self._request_arrival.done():
            self._request_arrival.set_result(None)

    def on_writable(self) -> None:
        """Let the handler write on: what waited is sent."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def cancel(self) -> None:
        """End the call without an answer: the client has cancelled it, or is gone."""
        self._is_over = True
        self._drop_request()
        self._stop_timer()
        if self.task is not None:
            self.task.cancel()

    def stop(self, refusal: CallRefused) -> None:
        """End the call with this status, and cancel its handler."""
        if not self._is_over:
            status = status_block(refusal.code, str(refusal)) if self._has_begun else trailers_only(refusal)
            self._link.end(self._stream, status)
        self.cancel()

    # Called by the handler: `grpc.aio.ServicerContext`.

    async def write(self, message: Any) -> None:
        if not self.write_now(message) and not self._is_over:
            self._writable = self._loop.create_future()
            late = self._loop.call_later(self._stall_s, self._stall)
            try:
                await self._writable
            finally:
                late.cancel()
                self._writable = None

    def _stall(self) -> None:
        detail = f"nothing of the answer was read for {self._stall_s:g} s"
        self.stop(CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, detail))

    @property
    def has_room(self) -> bool:
        """Whether `write_now` would send a message at once."""
        return not self._is_over and self._link.has_room(self._stream)

    def write_now(self, message: Any) -> bool:
        """Write a message without waiting; False: the next one has to wait. Not while a `write` is waiting."""
        data = self._serialize(message)
        self._begin()
        return self._link.send(self._stream, _MESSAGE_PREFIX.pack(0, len(data)) + data)

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
        return self.call_details.invocation_metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._detail = details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Do nothing: answers are never compressed."""

    def disable_next_message_compression(self) -> None:
        """Do nothing: answers are never compressed."""

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

    # The call from begin to end.

    async def serve(self, find: Callable[[CallDetails], Any]) -> None:
        """Find the handler, give it the request, send its answer. Runs in a task, which `cancel` cancels."""
        if self.call_details.caller is not None:
            current_caller.set(self.call_details.caller)
        try:
            await self._answer(await find(self.call_details))
            self._finish(self._code, self._detail)
        except CallRefused as bad:
            self._finish(bad.code, str(bad))
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            # It must not leave: the task would keep the exception, which has this frame, which has the call, which has
            # the task: a cycle.
            self._finish(*(_DEADLINE_EXCEEDED if self._is_expired else (grpc.StatusCode.CANCELLED, "Cancelled")))
        except Exception as fault:
            _log.exception("%s failed", self.call_details.method)
            self._finish(grpc.StatusCode.UNKNOWN, f"Unexpected {type(fault)}: {fault}")
        finally:
            self._drop_request()
            self._stop_timer()
            self.task = None

    async def _answer(self, handler: Any) -> None:
        if handler is None:
            raise CallRefused(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
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
            await self._wait_for_request()
        if self._refusal is not None:
            raise CallRefused(*self._refusal)
        request = self._next_request()
        if request is None and self._buffer:
            raise CallRefused(grpc.StatusCode.INTERNAL, "the request's message is cut off")
        if request is None or self._buffer:
            raise _not_one_message()
        return request

    async def _each(self, read: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        while True:
            while (request := self._next_request()) is not None:
                yield read(request)
            if self._refusal is not None:
                raise CallRefused(*self._refusal)
            if self._is_ended:
                return
            await self._wait_for_request()

    async def _wait_for_request(self) -> None:
        self._request_arrival = self._loop.create_future()
        try:
            async with asyncio.timeout(IDLE_REQUEST_S):
                await self._request_arrival
        except TimeoutError:
            detail = f"nothing more of the request came for {IDLE_REQUEST_S:g} s"
            raise CallRefused(grpc.StatusCode.DEADLINE_EXCEEDED, detail) from None
        finally:
            self._request_arrival = None

    def _check_bounds(self) -> None:
        """Raise CallRefused if the unread bytes are more than may be held."""
        num_bytes = len(self._buffer)
        if self._takes_stream:
            # One message that waits to be read, and one that is coming.
            if num_bytes > 2 * (self._max_message_bytes + _MESSAGE_PREFIX.size):
                raise CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, "more requests than are read")
        elif num_bytes >= _MESSAGE_PREFIX.size and num_bytes > self._first_size() + _MESSAGE_PREFIX.size:
            raise _not_one_message()

    def _first_size(self) -> int:
        """Return the length of the message that the buffer begins with; raises CallRefused if that can't be taken."""
        is_compressed, size = _MESSAGE_PREFIX.unpack_from(self._buffer)
        if size > self._max_message_bytes:
            raise self._too_large(size)
        if is_compressed and not self._is_gzip:
            raise CallRefused(grpc.StatusCode.UNIMPLEMENTED, "requests may be compressed with gzip alone")
        return int(size)

    def _next_request(self) -> bytes | None:
        """Cut off and return the next message; None: none is whole. Raises CallRefused."""
        buffer = self._buffer
        if len(buffer) < _MESSAGE_PREFIX.size:
            return None
        stop = _MESSAGE_PREFIX.size + self._first_size()
        if len(buffer) < stop:
            return None
        is_compressed, data = buffer[0], bytes(memoryview(buffer)[_MESSAGE_PREFIX.size : stop])
        del buffer[:stop]
        self._unread.add(-stop)
        # Not earlier: unread bytes must be no more than what was sent.
        return self._inflated(data) if is_compressed else data

    def _inflated(self, data: bytes) -> bytes:
        inflater = zlib.decompressobj(wbits=31)
        try:
            message = inflater.decompress(data, self._max_message_bytes + 1)
        except zlib.error as error:
            raise CallRefused(grpc.StatusCode.INTERNAL, f"a message can't be decompressed: {error}") from error
        if len(message) > self._max_message_bytes:
            raise self._too_large(len(message))
        if not inflater.eof:
            raise CallRefused(grpc.StatusCode.INTERNAL, "a compressed message is cut off")
        return message

    def _too_large(self, size: int) -> CallRefused:
        detail = f"Received message larger than max ({size} vs. {self._max_message_bytes})"
        return CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, detail)

    def _begin(self, metadata: Iterable[Metadatum] = ()) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._link.send_headers(self._stream, RESPONSE_HEADERS + metadata_block(metadata))

    def _finish(self, code: grpc.StatusCode, detail: str) -> None:
        """Send the status; does nothing for a call that is over."""
        if self._is_over:
            return
        self._is_over = True
        self._stop_timer()
        first = b"" if self._has_begun else RESPONSE_HEADERS
        self._link.finish(self._stream, first + status_block(code, detail) + metadata_block(self._trailing))

    def _expire(self) -> None:
        self._timer = None
        self._is_expired = True
        if self.task is not None:
            self.task.cancel()
        else:
            self._finish(*_DEADLINE_EXCEEDED)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _not_one_message() -> CallRefused:
    """Return the refusal of none or several messages where a method takes one (gRPC's statuscodes.md)."""
    return CallRefused(grpc.StatusCode.UNIMPLEMENTED, "a method of one message takes exactly one")

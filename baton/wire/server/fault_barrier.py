"""Turns the exceptions of all Baton servicers into gRPC statuses, and refuses callers without permission.

A `BatonError` reaches the client as its own status. Any other exception is a bug of Baton: it is logged, and the client
gets INTERNAL without details. Bytes that can't be decoded are the client's fault: INVALID_ARGUMENT.

A client may keep its connection alive without reading a stream. HTTP/2's flow control then blocks the write, and with
it everything that the stream holds. Such a call is ended after a while with RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from baton.errors import BatonError, InvalidRequest, SlowReader
from baton.wire import status
from baton.wire.authenticator import Authenticator
from baton.wire.http2.call_headers import CallDetails, CallRefused

_log = logging.getLogger(__name__)
_BATON_PREFIX = "/baton."
_PUBLIC_PREFIX = "/baton.v1.Generation/"
"""The service whose slow readers are cut off here. Nodes and routers bound their own streams."""
_UNREADABLE = object()
"""Stands for a request that can't be decoded."""

_Behaviour = Callable[[Any, Any], Any]
_FACTORIES = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class FaultBarrier(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps the servicers of one server. Calls of health and reflection are only authenticated."""

    def __init__(self, stall_s: float = 30.0, authenticator: Authenticator | None = None) -> None:
        """`stall_s`: seconds that a client of the public service may take to read one message."""
        self._stall_s = stall_s
        self.authenticator = authenticator or Authenticator()
        self._guarded: dict[str, tuple[Any, Any]] = {}
        """By method, the handler that the server has for it, and what it became."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = str(handler_call_details.method)
        if not isinstance(handler_call_details, CallDetails) or handler_call_details.caller is None:
            try:
                # This happens before the request is read. Baton's own server has done it already.
                self.authenticator.check_key(method, handler_call_details.invocation_metadata)
            except BatonError as error:
                return _refusing(error)
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith(_BATON_PREFIX):
            return handler
        known, guarded = self._guarded.get(method, (None, None))
        if known is not handler:
            guarded = self._guard(handler, method)
            self._guarded[method] = handler, guarded
        return guarded

    def _guard(self, handler: Any, method: str) -> Any:
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        make = _FACTORIES[handler.request_streaming, handler.response_streaming]
        read = _reader(handler.request_deserializer, is_stream=handler.request_streaming)
        if not inspect.isasyncgenfunction(behaviour):
            guarded = _guarded_call(behaviour, method, self.authenticator)
        elif method.startswith(_PUBLIC_PREFIX):
            guarded = _guarded_writer(behaviour, method, self.authenticator, self._stall_s)
        else:
            guarded = _guarded_generator(behaviour, method, self.authenticator)
        return make(guarded, read, handler.response_serializer)


def _reader(deserialize: Callable[[bytes], Any], *, is_stream: bool) -> Callable[[bytes], Any]:
    """A deserialiser that reports bytes which can't be decoded as InvalidRequest.

    In a stream the error is raised where the servicer reads the message. A single request is read by gRPC, before the
    servicer is called, and is marked instead.
    """

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception as error:
            if is_stream:
                raise _unreadable() from error
            return _UNREADABLE

    return read


def _unreadable() -> InvalidRequest:
    return InvalidRequest("request", "can't be decoded: its bytes are damaged, or a text is not UTF-8")


def _refusing(error: BatonError) -> Any:
    """A handler that ends every kind of call with this error."""

    async def refuse(_requests: Any, context: Any) -> None:
        await status.abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


@asynccontextmanager
async def _translated(request: Any, context: Any, method: str, authenticator: Authenticator) -> AsyncIterator[None]:
    try:
        authenticator.check_certificate(method, context)
        if request is _UNREADABLE:
            raise _unreadable()
        yield
    except (grpc.aio.AbortError, CallRefused):
        raise
    except BatonError as error:
        await status.abort(context, error)
    except Exception:
        _log.exception("%s failed", method)
        await status.abort(context, BatonError("internal error; the log of the server has it"))


def _guarded_call(behaviour: _Behaviour, method: str, authenticator: Authenticator) -> _Behaviour:
    async def call(request: Any, context: Any) -> Any:
        async with _translated(request, context, method, authenticator):
            return await behaviour(request, context)

    return call


def _guarded_generator(behaviour: _Behaviour, method: str, authenticator: Authenticator) -> _Behaviour:
    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        # A generator that is cancelled while gRPC writes is never resumed, and `aclosing` ends the inner one all the
        # same.
        async with (
            _translated(request, context, method, authenticator),
            aclosing(behaviour(request, context)) as responses,
        ):
            async for response in responses:
                yield response

    return generate


def _guarded_writer(behaviour: _Behaviour, method: str, authenticator: Authenticator, stall_s: float) -> _Behaviour:
    async def call(request: Any, context: Any) -> None:
        watch = WriteWatch(stall_s)
        try:
            async with _translated(request, context, method, authenticator):
                try:
                    async with aclosing(behaviour(request, context)) as responses:
                        async for response in responses:
                            watch.begin_write()
                            await context.write(response)
                            watch.end_write()
                except asyncio.CancelledError:
                    watch.raise_if_stalled()
                    raise
        finally:
            watch.stop()

    return call


class WriteWatch:
    """Cancels the running task when one of its writes takes too long. It has one timer per stream, not per message."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: seconds that a write may take."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._limit_s = limit_s
        self._since: float | None = None
        """When the present write began; None between two writes."""
        self._late: float | None = None
        """When the write began that had exceeded the limit at the latest check."""
        self._is_stalled = False
        self._timer = self._loop.call_later(limit_s, self._check)

    def begin_write(self) -> None:
        """Note that a write begins."""
        self._since = self._loop.time()

    def end_write(self) -> None:
        """Note that the write has ended."""
        self._since = None

    def stop(self) -> None:
        """Cancel the timer: the stream has ended."""
        self._timer.cancel()

    def raise_if_stalled(self) -> None:
        """Raise SlowReader if this watch has caused the cancellation of the task."""
        if self._is_stalled and self._task is not None:
            self._task.uncancel()
            raise SlowReader(f"the client has not read its stream for {self._limit_s:g} s")

    def _check(self) -> None:
        now = self._loop.time()
        due = (now if self._since is None else self._since) + self._limit_s
        if now < due:
            self._timer = self._loop.call_at(due, self._check)
        elif self._late != self._since:
            # The event loop itself may have been blocked, so that the end of the write is reported in its next turns.
            self._late = self._since
            self._timer = self._loop.call_later(self._limit_s / 10, self._check)
        elif self._task is not None:
            self._is_stalled = True
            self._task.cancel()

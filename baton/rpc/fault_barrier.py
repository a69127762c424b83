"""What a servicer raises becomes a status here, for every method of every Baton service.

A `BatonError` reaches the client as what it is. Anything else is our own fault: it is logged here, and the client hears
INTERNAL without a word of it. Bytes that are no message are the caller's fault, INVALID_ARGUMENT.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from baton.errors import BatonError, InvalidRequest
from baton.rpc import status

_log = logging.getLogger(__name__)
_OURS = "/baton."
_UNREADABLE = object()

_Behaviour = Callable[[Any, Any], Any]
_FACTORIES = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class FaultBarrier(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before the servicers of one server; health and reflection pass."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith(_OURS):
            return handler
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        guard = _guarded_generator if inspect.isasyncgenfunction(behaviour) else _guarded_call
        make = _FACTORIES[handler.request_streaming, handler.response_streaming]
        read = _reader(handler.request_deserializer, is_stream=handler.request_streaming)
        return make(guard(behaviour, method), read, handler.response_serializer)


def _reader(deserialize: Callable[[bytes], Any], *, is_stream: bool) -> Callable[[bytes], Any]:
    """Of a stream, a broken message raises where the servicer reads it; of a single request, gRPC reads it first."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception as error:
            if is_stream:
                raise _unreadable() from error
            return _UNREADABLE

    return read


def _unreadable() -> InvalidRequest:
    return InvalidRequest("request", "is no readable message: broken bytes, or text that is not UTF-8")


@asynccontextmanager
async def _translated(request: Any, context: Any, method: str) -> AsyncIterator[None]:
    try:
        if request is _UNREADABLE:
            raise _unreadable()
        yield
    except grpc.aio.AbortError:
        raise
    except BatonError as error:
        await status.abort(context, error)
    except Exception:
        _log.exception("%s failed", method)
        await status.abort(context, BatonError("internal error; the log of the server has it"))


def _guarded_call(behaviour: _Behaviour, method: str) -> _Behaviour:
    async def call(request: Any, context: Any) -> Any:
        async with _translated(request, context, method):
            return await behaviour(request, context)

    return call


def _guarded_generator(behaviour: _Behaviour, method: str) -> _Behaviour:
    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        # aclosing, since a generator that is cancelled while gRPC writes is never resumed: what is inside must end all
        # the same.
        async with _translated(request, context, method), aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                yield response

    return generate

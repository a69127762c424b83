"""A gRPC server without a network: request bytes in, response bytes and a status out, through the fault barrier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from baton.wire.server.fault_barrier import FaultBarrier

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(slots=True)
class Reply:
    """Everything that the caller received."""

    code: str = "OK"
    details: str = ""
    messages: list[bytes] = field(default_factory=list)
    trailer: dict[str, str | bytes] = field(default_factory=dict)

    @property
    def fields(self) -> set[str]:
        """The fields that the status names as invalid."""
        status = status_pb2.Status.FromString(self.trailer["grpc-status-details-bin"])
        bad = error_details_pb2.BadRequest()
        return {
            violation.field for detail in status.details if detail.Unpack(bad) for violation in bad.field_violations
        }


class _Context:
    """The context of one call, as a servicer sees it."""

    def __init__(self, reply: Reply, timeout_s: float | None, leave_after: int | None) -> None:
        self._reply = reply
        self._timeout_s = timeout_s
        self._leave_after = leave_after
        self.serialize: Callable[[Any], bytes] = bytes

    def time_remaining(self) -> float | None:
        return self._timeout_s

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._reply.trailer |= dict(metadata)

    async def write(self, message: Any) -> None:
        self._reply.messages.append(self.serialize(message))
        if len(self._reply.messages) == self._leave_after:
            # gRPC cancels a handler in its write, too.
            raise asyncio.CancelledError

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        self._reply.code, self._reply.details = code.name, details
        self._reply.trailer |= dict(trailing_metadata)
        raise grpc.aio.AbortError


class LocalServer:
    """A server to which servicers are added."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}
        self._barrier = FaultBarrier()

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        return

    def add_registered_method_handlers(self, name: str, handlers: dict[str, Any]) -> None:
        self._handlers |= {f"/{name}/{method}": handler for method, handler in handlers.items()}

    async def call(
        self, path: str, request: bytes, timeout_s: float | None = None, leave_after: int | None = None
    ) -> Reply:
        """Call a method. The caller disconnects after `leave_after` messages, if that is given."""
        reply = Reply()
        context = _Context(reply, timeout_s, leave_after)

        async def find(_: Any) -> Any:
            return self._handlers[path]

        details = SimpleNamespace(method=path, invocation_metadata=())
        handler = await self._barrier.intercept_service(find, details)  # type: ignore[arg-type]
        context.serialize = handler.response_serializer
        behaviour = handler.unary_stream or handler.unary_unary
        try:
            message = await behaviour(handler.request_deserializer(request), context)
            if message is not None:
                await context.write(message)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            if leave_after is None:
                raise
        return reply

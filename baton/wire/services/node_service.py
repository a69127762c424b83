"""The gRPC service of a node. It translates between Protocol Buffers and the calls of a `NodeHandler`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc

from baton.errors import ConfigError, InvalidRequest
from baton.messages.ids import AttemptKey
from baton.messages.node import NodeDescription, Role, RouterMessage, StepReport
from baton.messages.node_report import NodeReport, TraceEvent, TraceStep
from baton.model_formats.adapters import AdapterInfo
from baton.observe.log_limit import LimitedLog
from baton.v1 import node_pb2 as pb
from baton.v1 import node_pb2_grpc
from baton.wire.codec.node import (
    ADAPTER_INFO,
    NODE_DESCRIPTION,
    NODE_REPORT,
    TRACE_EVENT,
    TRACE_STEP,
    attempt_from_pb,
    report_to_pb,
    role_from_pb,
    router_message_from_pb,
)
from baton.wire.codec.report_stream import ReportWriter

_log = logging.getLogger(__name__)
_skipped_log = LimitedLog(_log)

SERVICE_NAME = "baton.v1.Node"

_Context = grpc.aio.ServicerContext[Any, Any]


class RouterPort(Protocol):
    """The node's interface for one attached router."""

    def receive(self, message: RouterMessage) -> None:
        """Handle a message of the router. Returns at once."""
        ...

    def refuse(self, attempt: AttemptKey, error: str) -> None:
        """Report to the router that the attempt failed, because its message could not be handled."""
        ...

    def reports(self) -> AsyncIterator[StepReport]:
        """The reports to send to the router, until the port is closed."""
        ...

    def close(self) -> None:
        """Detach the router. Idempotent."""
        ...


class NodeHandler(Protocol):
    """The operations of a node that routers call."""

    def describe(self) -> NodeDescription: ...

    def report(self) -> NodeReport: ...

    def open_port(self, router_id: str, router_incarnation: str, keeps: Sequence[AttemptKey]) -> RouterPort:
        """Attach a router. Raises Draining.

        `router_incarnation`: names the run of the router; empty: unknown. `keeps`: attempts of an earlier stream of the
        same run that continue.
        """
        ...

    def drain(self) -> None: ...

    def set_role(self, incarnation: str, role: Role) -> None:
        """Change the role when the running work is done. Raises ConfigError when another incarnation is meant."""
        ...

    async def reset_prefix_cache(self, incarnation: str) -> int:
        """Empty the prefix cache. Returns the number of blocks that it held.

        Raises CacheInUse, ConfigError when another incarnation is meant, DeadlineExceeded when the engine is too busy.
        """
        ...

    async def inspect_adapter(self, incarnation: str, directory: str) -> AdapterInfo:
        """Read the adapter in a directory of the node, and compare it with the model.

        Raises AdapterRefused, ConfigError when another incarnation is meant, DeadlineExceeded, Overloaded.
        """
        ...

    def trace(self, after: int) -> Sequence[TraceEvent]: ...

    def steps(self, after: int) -> Sequence[TraceStep]: ...


class NodeServicer(node_pb2_grpc.NodeServicer):
    """Connects each Attach stream with a port of the handler."""

    def __init__(self, handler: NodeHandler) -> None:
        self._handler = handler

    def add_to_server(self, server: grpc.aio.Server) -> None:
        node_pb2_grpc.add_NodeServicer_to_server(self, server)

    async def Attach(
        self, requests: AsyncIterator[pb.AttachRequest], context: _Context
    ) -> AsyncIterator[pb.AttachResponse]:
        hello = await self._greet(requests)
        keeps = [attempt_from_pb(attempt) for attempt in hello.keeps]
        port = self._handler.open_port(hello.router_id, hello.router_incarnation, keeps)
        reader = asyncio.create_task(self._read(requests, port), name="attach-read")
        to_pb = ReportWriter().write if hello.takes_next_tokens else report_to_pb
        try:
            yield pb.AttachResponse(welcome=NODE_DESCRIPTION.to_pb(self._handler.describe()))
            async for report in port.reports():
                yield pb.AttachResponse(report=to_pb(report))
        finally:
            reader.cancel()
            port.close()
        if reader.done() and not reader.cancelled():
            reader.result()

    async def _greet(self, requests: AsyncIterator[pb.AttachRequest]) -> pb.AttachHello:
        """Read the hello. Raises InvalidRequest, or ConfigError when the stream is for another incarnation."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidRequest("message", "the first message of a stream must be a hello")
        ours = self._handler.describe().incarnation
        if first.hello.incarnation not in ("", ours):
            raise ConfigError(f"this is {ours}, not {first.hello.incarnation}")
        return first.hello

    @staticmethod
    async def _read(requests: AsyncIterator[pb.AttachRequest], port: RouterPort) -> None:
        """Pass the router's messages to the port. A message that fails affects no other message."""
        try:
            async for request in requests:
                try:
                    port.receive(router_message_from_pb(request))
                except InvalidRequest as error:
                    _refuse(port, request, str(error))
                except Exception:
                    _log.exception("a message from a router failed")
                    _refuse(port, request, "an internal error of the node; see its log")
        finally:
            port.close()

    async def Describe(self, request: pb.DescribeRequest, context: _Context) -> pb.DescribeResponse:
        return NODE_REPORT.to_pb(self._handler.report())

    async def Drain(self, request: pb.DrainRequest, context: _Context) -> pb.DrainResponse:
        self._handler.drain()
        return pb.DrainResponse()

    async def SetRole(self, request: pb.SetRoleRequest, context: _Context) -> pb.SetRoleResponse:
        self._handler.set_role(request.incarnation, role_from_pb(request.role))
        return pb.SetRoleResponse()

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: _Context
    ) -> pb.ResetPrefixCacheResponse:
        return pb.ResetPrefixCacheResponse(num_blocks=await self._handler.reset_prefix_cache(request.incarnation))

    async def InspectAdapter(self, request: pb.InspectAdapterRequest, context: _Context) -> pb.InspectAdapterResponse:
        return ADAPTER_INFO.to_pb(await self._handler.inspect_adapter(request.incarnation, request.directory))

    async def Trace(self, request: pb.TraceRequest, context: _Context) -> pb.TraceResponse:
        steps = self._handler.steps(request.steps_after) if request.HasField("steps_after") else ()
        return pb.TraceResponse(
            events=[TRACE_EVENT.to_pb(event) for event in self._handler.trace(request.after)],
            monotonic_ns=time.monotonic_ns(),
            steps=[TRACE_STEP.to_pb(step) for step in steps],
        )


def _refuse(port: RouterPort, request: pb.AttachRequest, error: str) -> None:
    """Report that the message's attempt failed. A message without an attempt is skipped."""
    kind = request.WhichOneof("message")
    if kind == "submit":
        port.refuse(attempt_from_pb(request.submit.attempt), error)
    else:
        _skipped_log.happened("skipped a message from a router (%s): %s", kind, error)

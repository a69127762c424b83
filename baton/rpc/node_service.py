"""The node's side of the router's stream: Protocol Buffers in and out, a handler behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc

from baton.errors import BatonError, ConfigError, InvalidRequest
from baton.rpc import status
from baton.rpc.codec_node import (
    description_to_pb,
    load_to_pb,
    report_to_pb,
    router_message_from_pb,
    trace_to_pb,
)
from baton.rpc.messages import LoadReport, NodeDescription, RouterMessage, StepReport, TraceEvent
from baton.v1 import node_pb2 as node
from baton.v1 import node_pb2_grpc

SERVICE_NAME = "baton.v1.Node"

_Context = grpc.aio.ServicerContext[Any, Any]


class RouterPort(Protocol):
    """One router's end of the node, from attach to detach."""

    def receive(self, message: RouterMessage) -> None:
        """Take work; returns at once."""
        ...

    def reports(self) -> AsyncIterator[StepReport]:
        """What to send up; ends when the port is closed."""
        ...

    def close(self) -> None:
        """The router is gone: everything it asked for is aborted. Idempotent."""
        ...


class NodeHandler(Protocol):
    """What a node does for routers."""

    def describe(self) -> NodeDescription: ...

    def load(self) -> LoadReport: ...

    def open_port(self, router_id: str) -> RouterPort: ...

    def drain(self) -> None: ...

    def trace(self, after: int) -> Sequence[TraceEvent]: ...


class NodeServicer(node_pb2_grpc.NodeServicer):
    """Binds each Attach stream to a port of the handler."""

    def __init__(self, handler: NodeHandler) -> None:
        self._handler = handler

    def add_to_server(self, server: grpc.aio.Server) -> None:
        node_pb2_grpc.add_NodeServicer_to_server(self, server)

    async def Attach(
        self, requests: AsyncIterator[node.AttachRequest], context: _Context
    ) -> AsyncIterator[node.AttachResponse]:
        try:
            router_id = await self._greet(requests)
        except BatonError as error:
            await status.abort(context, error)
            return
        port = self._handler.open_port(router_id)
        reader = asyncio.create_task(self._read(requests, port), name=f"attach-{router_id}")
        try:
            yield node.AttachResponse(welcome=description_to_pb(self._handler.describe()))
            async for report in port.reports():
                yield node.AttachResponse(report=report_to_pb(report))
        finally:
            reader.cancel()
            port.close()
        if reader.done() and not reader.cancelled() and (error_raised := reader.exception()):
            refusal = error_raised if isinstance(error_raised, BatonError) else BatonError(str(error_raised))
            await status.abort(context, refusal)

    async def _greet(self, requests: AsyncIterator[node.AttachRequest]) -> str:
        """The hello; raises InvalidRequest or ConfigError when the stream is not meant for this incarnation."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidRequest("message", "a stream begins with hello")
        ours = self._handler.describe().incarnation
        if first.hello.incarnation not in ("", ours):
            raise ConfigError(f"this is {ours}, not {first.hello.incarnation}")
        return first.hello.router_id

    @staticmethod
    async def _read(requests: AsyncIterator[node.AttachRequest], port: RouterPort) -> None:
        try:
            async for request in requests:
                port.receive(router_message_from_pb(request))
        finally:
            port.close()

    async def Describe(self, request: node.DescribeRequest, context: _Context) -> node.DescribeResponse:
        return node.DescribeResponse(
            node=description_to_pb(self._handler.describe()), load=load_to_pb(self._handler.load())
        )

    async def Drain(self, request: node.DrainRequest, context: _Context) -> node.DrainResponse:
        self._handler.drain()
        return node.DrainResponse()

    async def Trace(self, request: node.TraceRequest, context: _Context) -> node.TraceResponse:
        return node.TraceResponse(events=[trace_to_pb(event) for event in self._handler.trace(request.after)])

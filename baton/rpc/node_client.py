"""The router's side of the stream to a node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc

from baton.errors import Cancelled, NodeLost
from baton.rpc import status
from baton.rpc.channel import CHANNEL_OPTIONS
from baton.rpc.codec_node import (
    description_from_pb,
    router_message_to_pb,
    trace_from_pb,
)
from baton.rpc.codec_node_report import node_report_from_pb
from baton.rpc.messages import NodeDescription, NodeReport, RouterMessage, StepReport, TraceEvent
from baton.rpc.report_stream import ReportReader
from baton.v1 import node_pb2 as node
from baton.v1 import node_pb2_grpc

_Call = grpc.aio.StreamStreamCall[node.AttachRequest, node.AttachResponse]


class NodeStream:
    """One attached incarnation. Iterating yields its reports and raises NodeLost when it is gone."""

    def __init__(self, welcome: NodeDescription, call: _Call) -> None:
        self.welcome = welcome
        self._call = call
        self._write_lock = asyncio.Lock()
        self._reports = ReportReader()

    async def send(self, message: RouterMessage) -> None:
        """Send work; raises NodeLost."""
        try:
            # grpc.aio allows one write at a time.
            async with self._write_lock:
                await self._call.write(router_message_to_pb(message))
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise NodeLost(f"node {self.welcome.node_id} is gone: {error}") from error

    async def __aiter__(self) -> AsyncIterator[StepReport]:
        try:
            # read() throughout: grpc.aio does not let a call be read both ways, and the welcome was read so.
            while isinstance(response := await self._call.read(), node.AttachResponse):
                if response.WhichOneof("message") == "report":
                    yield self._reports.read(response.report)
        except grpc.RpcError as error:
            raise status.lost(error, self.welcome.node_id) from error
        raise NodeLost(f"node {self.welcome.node_id} ended the stream")

    async def close(self) -> None:
        """End the stream; what the node still runs for it has the node's grace to be adopted. Idempotent."""
        self._call.cancel()


class NodeClient:
    """Speaks to the node that listens on `address`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = node_pb2_grpc.NodeStub(self._channel)

    async def attach(self, router_id: str, incarnation: str = "", router_incarnation: str = "") -> NodeStream:
        """Open the stream; raises NodeLost, or the node's own refusal when it is another incarnation.

        `router_incarnation`: which run of the router this is; what an earlier stream of it had asked for is over.
        """
        call = self._stub.Attach()
        hello = node.AttachHello(
            router_id=router_id,
            incarnation=incarnation,
            router_incarnation=router_incarnation,
            takes_next_tokens=True,
        )
        try:
            await call.write(node.AttachRequest(hello=hello))
            first = await call.read()
            if not isinstance(first, node.AttachResponse) or first.WhichOneof("message") != "welcome":
                raise NodeLost(f"{self.address} did not say welcome")
            return NodeStream(description_from_pb(first.welcome), call)
        except grpc.RpcError as error:
            refusal = status.from_rpc_error(error, self.address)
            # Nobody here cancelled: the node did, because it is ending.
            raise (NodeLost(f"{self.address} is ending") if isinstance(refusal, Cancelled) else refusal) from error
        except asyncio.InvalidStateError as error:
            raise NodeLost(f"{self.address} ended the stream: {error}") from error
        except BaseException:
            call.cancel()
            raise

    async def describe(self, timeout_s: float | None = None) -> NodeReport:
        """What the node is, how busy, and what it hands over or takes in; raises Unreachable or DeadlineExceeded."""
        try:
            response = await self._stub.Describe(node.DescribeRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise status.from_rpc_error(error, self.address) from error
        return node_report_from_pb(response)

    async def drain(self) -> None:
        """Ask the node to take no new work and to end when it is done."""
        try:
            await self._stub.Drain(node.DrainRequest())
        except grpc.RpcError as error:
            raise status.from_rpc_error(error, self.address) from error

    async def trace(self, after: int = 0) -> Sequence[TraceEvent]:
        """The node's latest events, oldest first."""
        try:
            response = await self._stub.Trace(node.TraceRequest(after=after))
        except grpc.RpcError as error:
            raise status.from_rpc_error(error, self.address) from error
        return [trace_from_pb(event) for event in response.events]

    async def close(self) -> None:
        await self._channel.close(None)

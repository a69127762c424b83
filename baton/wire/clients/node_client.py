"""The client of a node's gRPC service: the stream of a router to a node, and the unary calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from baton.errors import AdapterRefused, BatonError, Cancelled, NobodyListens, NodeLost, Unreachable
from baton.messages.ids import AttemptKey
from baton.messages.node import NodeDescription, Role, RouterMessage, StepReport
from baton.messages.node_report import NodeReport, NodeTrace, TraceEvent
from baton.model_formats.adapters import AdapterInfo
from baton.v1 import node_pb2 as node
from baton.v1 import node_pb2_grpc
from baton.wire import status
from baton.wire.codec.node import (
    ADAPTER_INFO,
    NODE_DESCRIPTION,
    NODE_REPORT,
    TRACE_EVENT,
    TRACE_STEP,
    attempt_to_pb,
    role_to_pb,
    router_message_to_pb,
)
from baton.wire.codec.report_stream import ReportReader
from baton.wire.credentials import PLAINTEXT_DIALER, Dialer
from baton.wire.http2.client import Http2Client, rpc_error
from baton.wire.http2.client_connection import CallEnd, call_headers

_ATTACH = "/baton.v1.Node/Attach"

OnReport = Callable[[StepReport], None]
OnLost = Callable[[NodeLost], None]


class NodeStream:
    """The stream of a router to one incarnation of a node, on a connection of its own."""

    welcome: NodeDescription
    """The node's description, with which it answered the hello."""

    def __init__(self, client: Http2Client, address: str) -> None:
        """Called by `NodeClient.attach`."""
        self._client = client
        self._name = address
        self._reports = ReportReader()
        self._early: list[node.AttachResponse] = []
        """Messages that arrived before `listen` was called."""
        self._on_report: OnReport | None = None
        self._on_lost: OnLost | None = None
        self._loss: NodeLost | None = None
        self.call_end: CallEnd | None = None
        """How the call ended; None while it runs."""
        self._changed = asyncio.Event()
        self._call = client.call(call_headers(_ATTACH, address, is_tls=client.is_tls), self)

    async def greet(self, hello: node.AttachHello) -> bool:
        """Send the hello. Returns whether the node answered with its welcome."""
        self._send(node.AttachRequest(hello=hello))
        while not self._early and self.call_end is None:
            self._changed.clear()
            await self._changed.wait()
        if not self._early or self._early[0].WhichOneof("message") != "welcome":
            return False
        self.welcome = NODE_DESCRIPTION.from_pb(self._early.pop(0).welcome)
        self._name = self.welcome.node_id
        return True

    def listen(self, on_report: OnReport, on_lost: OnLost) -> None:
        """Call `on_report` for each report, those that have already arrived included, and `on_lost` once at the end.

        `on_lost` is not called after `close`. Neither function may raise. To be called once.
        """
        self._on_report = on_report
        early, self._early = self._early, []
        for response in early:
            self._handle(response)
        self._on_lost = on_lost
        if self._loss is not None:
            on_lost(self._loss)

    def send(self, message: RouterMessage) -> None:
        """Send a message without waiting. Raises NodeLost."""
        if self._loss is not None:
            raise self._loss
        self._send(router_message_to_pb(message))

    async def close(self) -> None:
        """End the stream. Attempts that still run on the node can be adopted during its grace period. Idempotent."""
        self._loss = self._loss or NodeLost(f"node {self._name} is gone: the stream is closed")
        self._client.cancel(self._call)
        self._client.close()

    # Called by the connection.

    def on_messages(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            if self._loss is not None:
                return
            try:
                response = node.AttachResponse.FromString(message)
            except DecodeError:
                self._end(NodeLost(f"node {self._name} has sent a message that can't be decoded"))
                return
            if self._on_report is None:
                self._early.append(response)
                self._changed.set()
            else:
                self._handle(response)

    def on_end(self, end: CallEnd) -> None:
        self.call_end = end
        self._changed.set()
        if end.code is grpc.StatusCode.OK:
            self._end(NodeLost(f"node {self._name} ended the stream"))
        else:
            self._end(NodeLost(f"node {self._name} is gone: {end.detail}"))

    # Internals.

    def _send(self, request: node.AttachRequest) -> None:
        self._client.send(self._call, request.SerializeToString())

    def _handle(self, response: node.AttachResponse) -> None:
        """Handle one message. Kinds of messages that only a newer version knows are ignored."""
        if response.WhichOneof("message") != "report" or self._loss is not None:
            return
        assert self._on_report is not None
        try:
            report = self._reports.read(response.report)
        except BatonError as error:
            self._end(NodeLost(f"node {self._name} has sent a report that contradicts its earlier ones: {error}"))
            return
        self._on_report(report)

    def _end(self, loss: NodeLost) -> None:
        if self._loss is None:
            self._loss = loss
            self._client.close()
            if self._on_lost is not None:
                self._on_lost(loss)


class NodeClient:
    """The client of one node's gRPC service at `address`."""

    def __init__(self, address: str, dialer: Dialer = PLAINTEXT_DIALER) -> None:
        self.address = address
        self._dialer = dialer
        self._channel: grpc.aio.Channel | None = None

    async def attach(
        self,
        router_id: str,
        incarnation: str = "",
        router_incarnation: str = "",
        keeps: Sequence[AttemptKey] = (),
    ) -> NodeStream:
        """Open the stream. Raises NodeLost, Unreachable (NobodyListens when the process is known to be gone), or the
        error with which the node refuses: ConfigError when it is another incarnation.

        `router_incarnation`: names this run of the router. Attempts of its earlier stream end on the node, except those
        in `keeps`, which the router will adopt on this stream.
        """
        host, _, port = self.address.rpartition(":")
        try:
            tls, peer = self._dialer.context(), self._dialer.peer
            client = await Http2Client.open(host.strip("[]"), int(port), tls, peer or None)
        except ConnectionRefusedError as error:
            raise NobodyListens(f"{self.address} does not answer: {error}") from error
        except (OSError, ValueError) as error:
            raise Unreachable(f"{self.address} does not answer: {error}") from error
        hello = node.AttachHello(
            router_id=router_id,
            incarnation=incarnation,
            router_incarnation=router_incarnation,
            takes_next_tokens=True,
            keeps=map(attempt_to_pb, keeps),
        )
        is_welcome = False
        try:
            stream = NodeStream(client, self.address)
            is_welcome = await stream.greet(hello)
        finally:
            if not is_welcome:
                client.close()
        if is_welcome:
            return stream
        if stream.call_end is None or stream.call_end.code is grpc.StatusCode.OK:
            raise NodeLost(f"{self.address} ended the stream without a welcome")
        refusal = status.from_rpc_error(rpc_error(stream.call_end), self.address)
        # The cancellation came from the node, which is ending.
        raise NodeLost(f"{self.address} is ending") if isinstance(refusal, Cancelled) else refusal

    async def describe(self, timeout_s: float | None = None) -> NodeReport:
        """The node's description, load and hand-offs. Raises Unreachable or DeadlineExceeded."""
        return NODE_REPORT.from_pb(await self._call("Describe", node.DescribeRequest(), timeout_s))

    async def drain(self, timeout_s: float | None = None) -> None:
        """Ask the node to take no new work and to end its process when the running work is done."""
        await self._call("Drain", node.DrainRequest(), timeout_s)

    async def set_role(self, role: Role, incarnation: str = "", timeout_s: float | None = None) -> None:
        """Ask the node to change its role when its running work is done. Raises ConfigError for another incarnation."""
        await self._call("SetRole", node.SetRoleRequest(incarnation=incarnation, role=role_to_pb(role)), timeout_s)

    async def reset_prefix_cache(self, incarnation: str = "", timeout_s: float | None = None) -> int:
        """Empty the node's prefix cache. Returns the number of blocks that it held.

        Raises CacheInUse, ConfigError for another incarnation, BatonError when its version has no such call.
        """
        lacking = BatonError(
            f"the version of {self.address} can't reset its prefix cache: restart the node to empty the cache"
        )
        request = node.ResetPrefixCacheRequest(incarnation=incarnation)
        return int((await self._call("ResetPrefixCache", request, timeout_s, lacking)).num_blocks)

    async def inspect_adapter(
        self, directory: str, incarnation: str = "", timeout_s: float | None = None
    ) -> AdapterInfo:
        """What the node says of the adapter in one of its directories.

        Raises AdapterRefused, ConfigError for another incarnation, Unreachable, DeadlineExceeded, Overloaded.
        """
        lacking = AdapterRefused(f"the version of {self.address} knows no adapters: update the node")
        request = node.InspectAdapterRequest(incarnation=incarnation, directory=directory)
        return ADAPTER_INFO.from_pb(await self._call("InspectAdapter", request, timeout_s, lacking))

    async def trace(self, after: int = 0) -> Sequence[TraceEvent]:
        """The node's latest events, the oldest first."""
        response = await self._call("Trace", node.TraceRequest(after=after))
        return [TRACE_EVENT.from_pb(event) for event in response.events]

    async def trace_steps(self, after: int, steps_after: int, timeout_s: float | None = None) -> NodeTrace:
        """The events and engine steps with larger numbers than these, and the node's clock at the answer."""
        response = await self._call("Trace", node.TraceRequest(after=after, steps_after=steps_after), timeout_s)
        return NodeTrace(
            response.monotonic_ns,
            [TRACE_EVENT.from_pb(event) for event in response.events],
            [TRACE_STEP.from_pb(step) for step in response.steps],
        )

    async def _call(
        self, rpc: str, request: Message, timeout_s: float | None = None, lacking: BatonError | None = None
    ) -> Any:
        """The response to a call without a stream. Raises BatonErrors; `lacking`: that of a node without the call."""
        if self._channel is None:
            # Most clients only open streams, which have connections of their own.
            self._channel = self._dialer.channel(self.address)
        try:
            return await getattr(node_pb2_grpc.NodeStub(self._channel), rpc)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            if lacking and isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise lacking from error
            raise status.from_rpc_error(error, self.address) from error

    async def close(self) -> None:
        """Close the channel. Streams that were opened have connections of their own and stay open."""
        if self._channel is not None:
            await self._channel.close(None)

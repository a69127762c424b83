"""The operator's gRPC service, on a port of its own at each router."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc

from baton.messages.adapters import AdapterRow, LoadedAdapter
from baton.messages.operator import (
    ClusterEvent,
    ClusterStatus,
    DrainProgress,
    MovedStream,
    PlanReport,
    RequestExplanation,
    RequestRow,
    RoleSet,
    TenantRows,
    Timeline,
)
from baton.v1 import operator_pb2 as pb
from baton.v1 import operator_pb2_grpc
from baton.wire.codec.operator import (
    ADAPTER_ROW,
    CLUSTER_EVENT,
    CLUSTER_STATUS,
    DRAIN_PROGRESS,
    LOADED_ADAPTER,
    MOVED_STREAM,
    PLAN_REPORT,
    REQUEST_EXPLANATION,
    REQUEST_ROW,
    TENANT_ROWS,
    TIMELINE,
)

SERVICE_NAME = "baton.v1.Operator"

_Context = grpc.aio.ServicerContext[Any, Any]


class OperatorHandler(Protocol):
    """The queries of operators that a router answers."""

    def status(self) -> ClusterStatus: ...

    def explain(self, request_id: str) -> RequestExplanation:
        """The decision of each attempt, and where it waits. Raises RequestNotFound."""
        ...

    def timeline(self, request_id: str) -> Timeline:
        """The stages of a finished request. Raises RequestNotFound."""
        ...

    def requests(self, limit: int, request_id: str = "") -> Sequence[RequestRow]:
        """Up to `limit` running and as many finished requests, the latest first; 0: all running ones.

        `request_id`: this request alone, if it is known.
        """
        ...

    def tenants(self, limit: int) -> TenantRows:
        """What the router has done for each tenant; at most `limit` of them, 0: all."""
        ...

    def plan(self) -> PlanReport:
        """What the router's planner has decided last."""
        ...


class SteeringHandler(Protocol):
    """The operations that a router carries out for operators.

    They raise NodeNotFound, InvalidRequest, and Unreachable without a registry.
    """

    async def cordon(self, names: Sequence[str]) -> str:
        """Cordon nodes. Returns a warning if the cluster serves less from now on; empty: it does not."""
        ...

    async def uncordon(self, names: Sequence[str]) -> None: ...

    async def set_role(self, name: str, role: str) -> RoleSet: ...

    def drain(self, name: str, stop: bool) -> AsyncIterator[DrainProgress]:
        """Yield the progress until the node is idle or, with `stop`, its process has ended."""
        ...

    async def reset_cache(self, name: str) -> int:
        """Empty a node's prefix cache. Returns the number of blocks that it held. Raises CacheInUse."""
        ...

    def events(self, after: int, follow: bool) -> AsyncIterator[ClusterEvent]: ...


class MoveHandler(Protocol):
    """Moves streams from one node to another."""

    async def move(self, request_id: str, to: str = "") -> MovedStream:
        """Move a stream, and return when it has moved; `to`: the name of the node, empty: one is chosen.

        Raises RequestNotFound, NodeNotFound, InvalidRequest, NoCapacity, and DeadlineExceeded if it stays where it is.
        """
        ...


class AdapterHandler(Protocol):
    """The adapters of a cluster. Its commands raise Unreachable without a registry."""

    async def load_adapter(self, name: str, directory: str, *, replaces: bool = False) -> LoadedAdapter:
        """Give a name to the adapter in a directory of the nodes; `replaces`: it may have another adapter already.

        Raises InvalidRequest, AdapterRefused, UnsupportedRequest, Overloaded.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Take the name away. Raises UnknownModel."""
        ...

    def list_adapters(self) -> Sequence[AdapterRow]: ...


class OperatorServicer(operator_pb2_grpc.OperatorServicer):
    """Calls the handler for each RPC."""

    def __init__(
        self, handler: OperatorHandler, steering: SteeringHandler, adapters: AdapterHandler, moves: MoveHandler
    ) -> None:
        self._handler = handler
        self._steering = steering
        self._adapters = adapters
        self._moves = moves

    def add_to_server(self, server: grpc.aio.Server) -> None:
        operator_pb2_grpc.add_OperatorServicer_to_server(self, server)

    async def GetStatus(self, request: pb.GetStatusRequest, context: _Context) -> pb.GetStatusResponse:
        return CLUSTER_STATUS.to_pb(self._handler.status())

    async def Explain(self, request: pb.ExplainRequest, context: _Context) -> pb.ExplainResponse:
        return REQUEST_EXPLANATION.to_pb(self._handler.explain(request.request_id))

    async def GetTimeline(self, request: pb.GetTimelineRequest, context: _Context) -> pb.GetTimelineResponse:
        return pb.GetTimelineResponse(timeline=TIMELINE.to_pb(self._handler.timeline(request.request_id)))

    async def ListRequests(self, request: pb.ListRequestsRequest, context: _Context) -> pb.ListRequestsResponse:
        rows = self._handler.requests(request.limit, request.request_id)
        return pb.ListRequestsResponse(requests=map(REQUEST_ROW.to_pb, rows))

    async def ListTenants(self, request: pb.ListTenantsRequest, context: _Context) -> pb.ListTenantsResponse:
        return TENANT_ROWS.to_pb(self._handler.tenants(request.limit))

    async def GetPlan(self, request: pb.GetPlanRequest, context: _Context) -> pb.GetPlanResponse:
        return PLAN_REPORT.to_pb(self._handler.plan())

    async def CordonNodes(self, request: pb.CordonNodesRequest, context: _Context) -> pb.CordonNodesResponse:
        return pb.CordonNodesResponse(warning=await self._steering.cordon(list(request.nodes)))

    async def UncordonNodes(self, request: pb.UncordonNodesRequest, context: _Context) -> pb.UncordonNodesResponse:
        await self._steering.uncordon(list(request.nodes))
        return pb.UncordonNodesResponse()

    async def SetNodeRole(self, request: pb.SetNodeRoleRequest, context: _Context) -> pb.SetNodeRoleResponse:
        done = await self._steering.set_role(request.node, request.role)
        return pb.SetNodeRoleResponse(unchanged=done.unchanged, warning=done.warning)

    async def DrainNode(self, request: pb.DrainNodeRequest, context: _Context) -> AsyncIterator[pb.DrainNodeResponse]:
        async for progress in self._steering.drain(request.node, request.stop):
            yield DRAIN_PROGRESS.to_pb(progress)

    async def ResetNodeCache(self, request: pb.ResetNodeCacheRequest, context: _Context) -> pb.ResetNodeCacheResponse:
        return pb.ResetNodeCacheResponse(num_blocks=await self._steering.reset_cache(request.node))

    async def MoveStream(self, request: pb.MoveStreamRequest, context: _Context) -> pb.MoveStreamResponse:
        return MOVED_STREAM.to_pb(await self._moves.move(request.request_id, request.node))

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: _Context) -> pb.LoadAdapterResponse:
        loaded = await self._adapters.load_adapter(request.name, request.directory, replaces=request.replaces)
        return LOADED_ADAPTER.to_pb(loaded)

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: _Context) -> pb.UnloadAdapterResponse:
        await self._adapters.unload_adapter(request.name)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: _Context) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(adapters=map(ADAPTER_ROW.to_pb, self._adapters.list_adapters()))

    async def WatchEvents(
        self, request: pb.WatchEventsRequest, context: _Context
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        async for event in self._steering.events(request.after, request.follow):
            yield pb.WatchEventsResponse(event=CLUSTER_EVENT.to_pb(event))

"""The blocking client of the operator's gRPC service, at a router's operator port."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import Message

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
from baton.security.access import Access, default_access
from baton.v1 import operator_pb2 as pb
from baton.v1 import operator_pb2_grpc
from baton.wire import status
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
from baton.wire.credentials import Dialer


class OperatorClient:
    """The client of one router's operator port, at HOST:PORT. Every call raises Unreachable, beside what it says."""

    def __init__(self, address: str, access: Access | None = None, dialer: Dialer | None = None) -> None:
        """`dialer`: how a process of the cluster calls, in place of an operator's `access`. Raises ConfigError."""
        self._address = address
        self._channel = (dialer or Dialer.to_operator(access or default_access.get())).blocking_channel(address)
        self._stub = operator_pb2_grpc.OperatorStub(self._channel)

    def status(self, timeout_s: float = 5.0) -> ClusterStatus:
        """The cluster as the router sees it."""
        return CLUSTER_STATUS.from_pb(self._call(self._stub.GetStatus, pb.GetStatusRequest(), timeout_s))

    def explain(self, request_id: str, timeout_s: float = 5.0) -> RequestExplanation:
        """The placement decision of each attempt of a request, and where it waits. Raises RequestNotFound."""
        request = pb.ExplainRequest(request_id=request_id)
        return REQUEST_EXPLANATION.from_pb(self._call(self._stub.Explain, request, timeout_s))

    def timeline(self, request_id: str, timeout_s: float = 5.0) -> Timeline:
        """The stages of a finished request with their durations. Raises RequestNotFound."""
        response = self._call(self._stub.GetTimeline, pb.GetTimelineRequest(request_id=request_id), timeout_s)
        return TIMELINE.from_pb(response.timeline)

    def requests(self, limit: int = 100, request_id: str = "", timeout_s: float = 5.0) -> Sequence[RequestRow]:
        """The latest running requests of this router and as many finished ones, up to `limit` each.

        `limit` 0: all running requests and no finished ones. `request_id`: this request alone, if the router knows it.
        """
        request = pb.ListRequestsRequest(limit=limit, request_id=request_id)
        return [REQUEST_ROW.from_pb(row) for row in self._call(self._stub.ListRequests, request, timeout_s).requests]

    def tenants(self, limit: int = 0, timeout_s: float = 5.0) -> TenantRows:
        """What this router has done for each tenant, at most `limit` of them; 0: all."""
        return TENANT_ROWS.from_pb(self._call(self._stub.ListTenants, pb.ListTenantsRequest(limit=limit), timeout_s))

    def plan(self, timeout_s: float = 5.0) -> PlanReport:
        """What this router's planner has decided last."""
        return PLAN_REPORT.from_pb(self._call(self._stub.GetPlan, pb.GetPlanRequest(), timeout_s))

    def cordon(self, names: Sequence[str], timeout_s: float = 5.0) -> str:
        """Give these nodes no new requests; running ones continue. Returns a warning if the cluster now serves less.

        Raises NodeNotFound, InvalidRequest, and Unreachable if the registry can't store it, when nothing changes.
        """
        return str(self._call(self._stub.CordonNodes, pb.CordonNodesRequest(nodes=names), timeout_s).warning)

    def uncordon(self, names: Sequence[str], timeout_s: float = 5.0) -> None:
        """Give these nodes requests again. Raises as `cordon`."""
        self._call(self._stub.UncordonNodes, pb.UncordonNodesRequest(nodes=names), timeout_s)

    def set_role(self, name: str, role: str, timeout_s: float = 5.0) -> RoleSet:
        """Make the node a `prefill` or `decode` node as soon as its running work is done. Raises as `cordon`."""
        response = self._call(self._stub.SetNodeRole, pb.SetNodeRoleRequest(node=name, role=role), timeout_s)
        return RoleSet(response.unchanged, response.warning)

    def reset_cache(self, name: str, timeout_s: float = 6.0) -> int:
        """Empty the prefix cache of a node. Returns the number of blocks that it held.

        Raises CacheInUse while any block there is in use, NodeNotFound, InvalidRequest.
        """
        return int(self._call(self._stub.ResetNodeCache, pb.ResetNodeCacheRequest(node=name), timeout_s).num_blocks)

    def move(self, request_id: str, to: str = "", timeout_s: float = 15.0) -> MovedStream:
        """Move a running stream to another decode node. `to`: its name; empty: the least loaded one that takes it.

        Raises RequestNotFound, NodeNotFound, InvalidRequest if it can't be moved, NoCapacity, and DeadlineExceeded if
        it stays where it is.
        """
        request = pb.MoveStreamRequest(request_id=request_id, node=to)
        return MOVED_STREAM.from_pb(self._call(self._stub.MoveStream, request, timeout_s))

    def load_adapter(
        self, name: str, directory: str, *, replaces: bool = False, timeout_s: float = 90.0
    ) -> LoadedAdapter:
        """Give a name to the adapter in a directory of the nodes; `replaces`: it may have another adapter already.

        Raises InvalidRequest for a bad or taken name, AdapterRefused if no node takes the adapter or nodes find
        different ones, UnsupportedRequest, Overloaded.
        """
        request = pb.LoadAdapterRequest(name=name, directory=directory, replaces=replaces)
        return LOADED_ADAPTER.from_pb(self._call(self._stub.LoadAdapter, request, timeout_s))

    def unload_adapter(self, name: str, timeout_s: float = 5.0) -> None:
        """Take an adapter's name away; running requests keep it. Raises UnknownModel."""
        self._call(self._stub.UnloadAdapter, pb.UnloadAdapterRequest(name=name), timeout_s)

    def adapters(self, timeout_s: float = 5.0) -> Sequence[AdapterRow]:
        """All adapters by name, and what the router's nodes say of them."""
        response = self._call(self._stub.ListAdapters, pb.ListAdaptersRequest(), timeout_s)
        return [ADAPTER_ROW.from_pb(row) for row in response.adapters]

    def drain(self, name: str, *, stop: bool = False, timeout_s: float | None = None) -> Iterator[DrainProgress]:
        """Cordon a node and report what still runs there until it is idle. `stop`: end its process then.

        Raises as `cordon`, and DeadlineExceeded after `timeout_s`, when the node stays cordoned.
        """
        request = pb.DrainNodeRequest(node=name, stop=stop)
        for response in self._stream(self._stub.DrainNode, request, timeout_s):
            yield DRAIN_PROGRESS.from_pb(response)

    def events(self, after: int = 0, *, follow: bool = False, timeout_s: float | None = None) -> Iterator[ClusterEvent]:
        """The cluster's events as this router saw them, the oldest first. `follow`: also those to come."""
        request = pb.WatchEventsRequest(after=after, follow=follow)
        for response in self._stream(self._stub.WatchEvents, request, timeout_s):
            yield CLUSTER_EVENT.from_pb(response.event)

    def _call(self, rpc: Any, request: Message, timeout_s: float) -> Any:
        with status.translated(self._address):
            return rpc(request, timeout=timeout_s)

    def _stream(self, rpc: Any, request: Message, timeout_s: float | None) -> Iterator[Any]:
        call = rpc(request, timeout=timeout_s)
        try:
            with status.translated(self._address):
                yield from call
        finally:
            # Its reader may stop reading early.
            call.cancel()

    def close(self) -> None:
        self._channel.close()

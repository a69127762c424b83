"""The blocking client side of the operator's gRPC service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from baton.messages.adapters import AdapterRow, LoadedAdapter
from baton.messages.operator import (
    ClusterEvent,
    ClusterStatus,
    DrainProgress,
    PlacementDecision,
    RequestRow,
    RoleSet,
    Timeline,
)
from baton.v1 import operator_pb2, operator_pb2_grpc
from baton.wire import status
from baton.wire.codec.operator import (
    ADAPTER_ROW,
    CLUSTER_EVENT,
    CLUSTER_STATUS,
    DRAIN_PROGRESS,
    LOADED_ADAPTER,
    PLACEMENT_DECISION,
    REQUEST_ROW,
    TIMELINE,
)
from baton.wire.credentials import PLAINTEXT_DIALER, Dialer


class OperatorStub:
    """Calls the operator's service with plain values, and raises BatonErrors."""

    def __init__(self, address: str, dialer: Dialer = PLAINTEXT_DIALER) -> None:
        self._address = address
        self._channel = dialer.blocking_channel(address)
        self._stub = operator_pb2_grpc.OperatorStub(self._channel)

    def status(self, timeout_s: float) -> ClusterStatus:
        with status.translated(self._address):
            response = self._stub.GetStatus(operator_pb2.GetStatusRequest(), timeout=timeout_s)
        return CLUSTER_STATUS.from_pb(response)

    def explain(self, request_id: str, timeout_s: float) -> Sequence[PlacementDecision]:
        """Raises RequestNotFound for a request that the router does not remember."""
        with status.translated(self._address):
            response = self._stub.Explain(operator_pb2.ExplainRequest(request_id=request_id), timeout=timeout_s)
        return [PLACEMENT_DECISION.from_pb(decision) for decision in response.decisions]

    def timeline(self, request_id: str, timeout_s: float) -> Timeline:
        """Raises RequestNotFound for a request that the router does not remember, or that has not ended."""
        with status.translated(self._address):
            response = self._stub.GetTimeline(operator_pb2.GetTimelineRequest(request_id=request_id), timeout=timeout_s)
        return TIMELINE.from_pb(response.timeline)

    def requests(self, limit: int, request_id: str, timeout_s: float) -> Sequence[RequestRow]:
        request = operator_pb2.ListRequestsRequest(limit=limit, request_id=request_id)
        with status.translated(self._address):
            response = self._stub.ListRequests(request, timeout=timeout_s)
        return [REQUEST_ROW.from_pb(row) for row in response.requests]

    def cordon(self, names: Sequence[str], timeout_s: float) -> str:
        with status.translated(self._address):
            response = self._stub.CordonNodes(operator_pb2.CordonNodesRequest(nodes=names), timeout=timeout_s)
        return str(response.warning)

    def uncordon(self, names: Sequence[str], timeout_s: float) -> None:
        with status.translated(self._address):
            self._stub.UncordonNodes(operator_pb2.UncordonNodesRequest(nodes=names), timeout=timeout_s)

    def set_role(self, name: str, role: str, timeout_s: float) -> RoleSet:
        with status.translated(self._address):
            response = self._stub.SetNodeRole(operator_pb2.SetNodeRoleRequest(node=name, role=role), timeout=timeout_s)
        return RoleSet(response.unchanged, response.warning)

    def reset_cache(self, name: str, timeout_s: float) -> int:
        with status.translated(self._address):
            response = self._stub.ResetNodeCache(operator_pb2.ResetNodeCacheRequest(node=name), timeout=timeout_s)
        return int(response.num_blocks)

    def load_adapter(self, name: str, directory: str, *, replaces: bool, timeout_s: float) -> LoadedAdapter:
        request = operator_pb2.LoadAdapterRequest(name=name, directory=directory, replaces=replaces)
        with status.translated(self._address):
            response = self._stub.LoadAdapter(request, timeout=timeout_s)
        return LOADED_ADAPTER.from_pb(response)

    def unload_adapter(self, name: str, timeout_s: float) -> None:
        with status.translated(self._address):
            self._stub.UnloadAdapter(operator_pb2.UnloadAdapterRequest(name=name), timeout=timeout_s)

    def adapters(self, timeout_s: float) -> Sequence[AdapterRow]:
        with status.translated(self._address):
            response = self._stub.ListAdapters(operator_pb2.ListAdaptersRequest(), timeout=timeout_s)
        return [ADAPTER_ROW.from_pb(row) for row in response.adapters]

    def drain(self, name: str, *, stop: bool, timeout_s: float | None) -> Iterator[DrainProgress]:
        call = self._stub.DrainNode(operator_pb2.DrainNodeRequest(node=name, stop=stop), timeout=timeout_s)
        with self._cancelled_at_exit(call):
            for response in call:
                yield DRAIN_PROGRESS.from_pb(response)

    def events(self, after: int, *, follow: bool, timeout_s: float | None) -> Iterator[ClusterEvent]:
        request = operator_pb2.WatchEventsRequest(after=after, follow=follow)
        call = self._stub.WatchEvents(request, timeout=timeout_s)
        with self._cancelled_at_exit(call):
            for response in call:
                yield CLUSTER_EVENT.from_pb(response.event)

    @contextmanager
    def _cancelled_at_exit(self, call: grpc.Call) -> Iterator[None]:
        """Translate errors, and cancel the call at the exit, in case its reader stops reading early."""
        try:
            with status.translated(self._address):
                yield
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._channel.close()

"""The operator's service on the router's own port."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from baton.errors import BatonError
from baton.rpc.explanations import PlacementDecision, decision_to_pb
from baton.rpc.messages import ClusterStatus, NodeStatus
from baton.rpc.status import abort
from baton.v1 import operator_pb2, operator_pb2_grpc

SERVICE_NAME = "baton.v1.Operator"


class OperatorHandler(Protocol):
    """What the router knows for operators."""

    def status(self) -> ClusterStatus: ...

    def explain(self, request_id: str) -> Sequence[PlacementDecision]:
        """Attempt by attempt; raises RequestNotFound."""
        ...


class OperatorServicer(operator_pb2_grpc.OperatorServicer):
    """Turns the handler's answers into Protocol Buffers."""

    def __init__(self, handler: OperatorHandler) -> None:
        self._handler = handler

    def add_to_server(self, server: grpc.aio.Server) -> None:
        operator_pb2_grpc.add_OperatorServicer_to_server(self, server)

    async def GetStatus(
        self, request: operator_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> operator_pb2.GetStatusResponse:
        status = self._handler.status()
        nodes = [operator_pb2.NodeStatus(**dataclasses.asdict(node)) for node in status.nodes]
        return operator_pb2.GetStatusResponse(
            cluster=status.cluster, health=status.health, detail=status.detail, nodes=nodes
        )

    async def Explain(
        self, request: operator_pb2.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> operator_pb2.ExplainResponse:
        try:
            decisions = self._handler.explain(request.request_id)
        except BatonError as error:
            await abort(context, error)
        return operator_pb2.ExplainResponse(decisions=[decision_to_pb(decision) for decision in decisions])


def status_from_pb(pb: operator_pb2.GetStatusResponse) -> ClusterStatus:
    """The router's answer as a value."""
    names = [field.name for field in dataclasses.fields(NodeStatus)]
    nodes = [NodeStatus(**{name: getattr(node, name) for name in names}) for node in pb.nodes]
    return ClusterStatus(pb.cluster, pb.health, pb.detail, nodes)

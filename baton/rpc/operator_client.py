"""The client's side of the operator's service, blocking."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from baton.rpc import status
from baton.rpc.channel import CHANNEL_OPTIONS
from baton.rpc.explanations import PlacementDecision, decision_from_pb
from baton.rpc.messages import ClusterStatus
from baton.rpc.operator_service import status_from_pb
from baton.v1 import operator_pb2, operator_pb2_grpc


class OperatorStub:
    """Messages out, BatonErrors raised."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = operator_pb2_grpc.OperatorStub(self._channel)

    def status(self, timeout_s: float) -> ClusterStatus:
        try:
            response = self._stub.GetStatus(operator_pb2.GetStatusRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise status.from_rpc_error(error, self._address) from error
        return status_from_pb(response)

    def explain(self, request_id: str, timeout_s: float) -> Sequence[PlacementDecision]:
        """Raises RequestNotFound for one that the router does not remember."""
        try:
            response = self._stub.Explain(operator_pb2.ExplainRequest(request_id=request_id), timeout=timeout_s)
        except grpc.RpcError as error:
            raise status.from_rpc_error(error, self._address) from error
        return [decision_from_pb(decision) for decision in response.decisions]

    def close(self) -> None:
        self._channel.close()
